"""Runs on each host, over plain TCP: `probes.py transfers PLAN` or `probes.py messages SIZES`, both in JSON.

`transfers` (`penstock cluster check`) times transfers between pairs: it waits for all hosts before every round, and
prints one JSON line for every transfer it received. `messages` (`penstock bench links`) times single messages between
two hosts after a pause, when token buckets are full: rank 0 prints one JSON line per size, the median over trials of
half the time there and back. Only the standard library, and nothing of penstock: the file is run by its path.
"""

import json
import os
import socket
import statistics
import sys
import time
from typing import Any

CONTROL_PORT, DATA_PORT = 5201, 5202
PINGS = 50
CHUNK = bytes(1 << 18)


def time_transfers(plan: dict[str, Any], rank: int) -> None:
    """Take part in every round of `plan`: `addresses`, `rounds` of `[source, target, nbytes]`, `trials`."""
    addresses = plan["addresses"]
    listener = socket.create_server((addresses[rank], DATA_PORT), backlog=len(addresses))
    control = _meet(rank, addresses)
    rounds = [(index, transfers) for _ in range(plan["trials"]) for index, transfers in enumerate(plan["rounds"])]
    for index, transfers in rounds:  # all rounds once, then again: a busy moment disturbs one trial of each
        _barrier(control, rank)
        for source, target, nbytes in transfers:
            if rank == source:
                _send(addresses[target], nbytes)
            elif rank == target:
                measured = _receive(listener, nbytes)
                print(json.dumps({"round": index, "source": source, "target": target} | measured), flush=True)
    _barrier(control, rank)


def _meet(rank: int, addresses: list[str]) -> list[socket.socket]:
    """Connect every host to the first; return the connections this host has."""
    if rank == 0:
        server = socket.create_server((addresses[0], CONTROL_PORT), backlog=len(addresses))
        return [server.accept()[0] for _ in addresses[1:]]
    return [_connect(addresses[0], CONTROL_PORT)]


def _barrier(control: list[socket.socket], rank: int) -> None:
    if rank != 0:
        control[0].sendall(b"x")
    for connection in control:
        _receive_exactly(connection, 1)
    if rank == 0:
        for connection in control:
            connection.sendall(b"x")


def _connect(address: str, port: int) -> socket.socket:
    """Connect to a peer that may not be listening yet."""
    for _ in range(3000):  # a minute: hosts of a busy machine start apart
        try:
            connection = socket.create_connection((address, port), timeout=60)
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
    raise SystemExit(f"no answer from {address} port {port}")


def _send(address: str, nbytes: int) -> None:
    with _connect(address, DATA_PORT) as connection:
        for _ in range(PINGS):
            _receive_exactly(connection, 1)
            connection.sendall(b"x")
        left = memoryview(CHUNK)
        while nbytes > 0:
            nbytes -= connection.send(left[: min(nbytes, len(left))])
        _receive_exactly(connection, 1)


def _receive(listener: socket.socket, nbytes: int) -> dict[str, float]:
    """Measure half the round trip of a byte, then the time of `nbytes` from the first byte to the last."""
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PINGS):
            start = time.perf_counter()
            connection.sendall(b"x")
            _receive_exactly(connection, 1)
            trips.append(time.perf_counter() - start)
        first, seconds = _drain(connection, nbytes)
        connection.sendall(b"x")
    return {
        "latency_seconds": statistics.median(trips) / 2,
        "nbytes": nbytes,
        "bits_per_second": 8 * (nbytes - first) / seconds,
    }


def _drain(connection: socket.socket, nbytes: int) -> tuple[int, float]:
    """Return the size of the first piece, and the seconds from its arrival to that of the last."""
    buffer = memoryview(bytearray(1 << 20))
    first = received = connection.recv_into(buffer)
    start = time.perf_counter()
    while received < nbytes:
        got = connection.recv_into(buffer)
        if got == 0:
            raise SystemExit(f"peer closed after {received} of {nbytes} bytes")
        received += got
    return first, time.perf_counter() - start


def _receive_exactly(connection: socket.socket, nbytes: int) -> None:
    while nbytes > 0:
        got = len(connection.recv(nbytes))
        if got == 0:
            raise SystemExit("peer closed the connection")
        nbytes -= got


MESSAGE_PORT = 5203
TRIALS = 7
PAUSE_SECONDS = 0.02


def time_messages(sizes: list[int], rank: int, address: str) -> None:
    """Time messages of these sizes, in bytes; rank 1 sends every message back."""
    connection = _listen(address) if rank == 0 else _connect(address, MESSAGE_PORT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for nbytes in sizes:
        seconds = statistics.median(_trip(connection, bytearray(nbytes), rank == 0) for _ in range(TRIALS)) / 2
        if rank == 0:
            print(json.dumps({"nbytes": nbytes, "seconds": seconds}), flush=True)


def _trip(connection: socket.socket, buffer: bytearray, first: bool) -> float:
    if not first:
        _fill(connection, buffer)
        connection.sendall(buffer)
        return 0.0
    time.sleep(PAUSE_SECONDS)
    start = time.perf_counter()
    connection.sendall(buffer)
    _fill(connection, buffer)
    return time.perf_counter() - start


def _fill(connection: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        got = connection.recv_into(view)
        if got == 0:
            raise SystemExit("peer closed the connection")
        view = view[got:]


def _listen(address: str) -> socket.socket:
    with socket.create_server((address, MESSAGE_PORT)) as server:
        return server.accept()[0]


if __name__ == "__main__":
    what, argument, own_rank = sys.argv[1], json.loads(sys.argv[2]), int(os.environ["RANK"])
    if what == "transfers":
        time_transfers(argument, own_rank)
    else:
        time_messages(argument, own_rank, os.environ["MASTER_ADDR"])
