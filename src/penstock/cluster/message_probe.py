"""What runs on two hosts to time single messages after a pause: when token buckets are full and flatter most.

Arguments: the sizes in bytes, as JSON. Rank 0 prints one JSON line per size: the median over trials of half the time
a message takes there and back. Only the standard library, and nothing of penstock: the file is run by its path.
"""

import json
import os
import socket
import statistics
import sys
import time

PORT = 5203
TRIALS = 7
PAUSE_SECONDS = 0.02


def main(sizes: list[int], rank: int, address: str) -> None:
    """Rank 1 sends every message back."""
    connection = _listen(address) if rank == 0 else _connect(address)
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
    with socket.create_server((address, PORT)) as server:
        return server.accept()[0]


def _connect(address: str) -> socket.socket:
    for _ in range(3000):  # a minute: hosts of a busy machine start apart
        try:
            return socket.create_connection((address, PORT), timeout=60)
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise SystemExit(f"no answer from {address} port {PORT}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(os.environ["RANK"]), os.environ["MASTER_ADDR"])
