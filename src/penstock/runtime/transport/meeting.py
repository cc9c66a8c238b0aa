"""Where torch's ranks meet: the process group that the environment describes, with nothing open that need not be.

torch's store listens on all interfaces, whatever address the ranks meet at. Where that address is this machine's own
(127.0.0.1), the store is given a socket that is bound to it.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]  # its stubs hide them

from penstock.errors import PenstockError, TransportError, shorten
from penstock.runtime import transport
from penstock.runtime.transport import end_in_time, never

Answer = TypeVar("Answer")
STORE = "the store in which the ranks met"
KEEPER = "rank 0 keeps it, unless torchrun does; without it, which rank was lost first cannot be told"
MARGIN_SECONDS = 5.0  # beyond what torch was told, before a store counts as one that does not answer
_HERE, _FAILED, _READ = "penstock/here/", "penstock/failed to join/", "penstock/knows/"
_LOOK_SECONDS = 0.02  # between looks for other ranks

_WAITING = 2048  # connections that may wait to be accepted, as torch has it


def join_group(backend: str, timeout: timedelta | None = None) -> None:
    """Make the default process group from torchrun's variables; on loopback, rank 0's store listens there only.

    `timeout` is the group's, and how long ranks wait for one another here; None: torch's own. Raises `TransportError`
    with the ranks that did not come.
    """
    timeout = timeout or dist.default_pg_timeout
    _check_place(os.environ)
    rank = int(os.environ.get("RANK", 0))
    with _joining(rank):
        store, rank, world_size = within(timeout.total_seconds() + MARGIN_SECONDS, partial(_open_store, timeout))
    wait_for_all(store, rank, world_size, timeout)
    place: dict[str, Any] = {"store": PrefixStore("default_pg", store), "rank": rank, "world_size": world_size}
    with _joining(rank):
        try:
            join = partial(dist.init_process_group, backend, timeout=timeout, **place)
            within(timeout.total_seconds() + MARGIN_SECONDS, join)
        except RuntimeError as error:  # gloo's, which has an address and no rank
            raise _silent(store, rank, world_size, error) from error


def _check_place(environment: Mapping[str, str]) -> None:
    """Refuse what no launcher sets: torch, and sockets, would say so each in their own words, or not at all."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not re.fullmatch("[0-9]{1,7}", text := environment.get(name, "0")):
            raise PenstockError(f"{name}: found {shorten(text)}; wanted a whole number, as torchrun sets it")
    rank, world_size = environment.get("RANK", "0"), environment.get("WORLD_SIZE")
    if world_size is not None and int(rank) >= int(world_size):
        raise PenstockError(f"RANK {rank}, WORLD_SIZE {world_size}: wanted ranks from 0 to one less than there are")
    if int(port := environment.get("MASTER_PORT", "0")) > 65535:
        raise PenstockError(f"MASTER_PORT: found {port}; wanted 65535 at most")


def _silent(store: Any, rank: int, world_size: int, error: RuntimeError) -> Exception:
    """Return what became of ranks that all had come: a rank without word, once those that live have left theirs."""
    keys = {each: f"{_FAILED}{each}" for each in range(world_size)}

    def ask() -> list[int]:
        store.set(keys[rank], "1")
        deadline = monotonic() + MARGIN_SECONDS
        while (silent := [each for each, key in keys.items() if not store.check([key])]) and monotonic() < deadline:
            sleep(_LOOK_SECONDS)
        _stay_for(store, rank, [each for each in keys if each not in silent])
        return silent

    silent = within(3 * MARGIN_SECONDS, ask)
    text = str(error).splitlines()[0]
    if len(silent) == 1:
        return ConnectionError(f"{text}; rank {silent[0]} did not answer: it died, hangs, or has ended")
    return ConnectionError(f"{text}; which rank is not known: all had joined, and {len(silent)} did not answer since")


def wait_for_all(store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
    """Return once every rank has come to the store; raise `TransportError` with those that have not in time."""
    keys = [f"{_HERE}{each}" for each in range(world_size)]

    def ask() -> list[int]:
        store.set(keys[rank], "1")
        try:
            store.wait(keys, timeout)
        except dist.DistStoreError:
            missing = [each for each, key in enumerate(keys) if not store.check([key])]
            _stay_for(store, rank, [each for each in range(world_size) if each not in missing])
            return missing
        return []

    with _joining(rank):
        if missing := within(timeout.total_seconds() + 2 * MARGIN_SECONDS, ask):
            who = " and ".join(f"rank {each}" for each in missing)
            raise ConnectionError(f"{who} did not come within {timeout.total_seconds():g} s")


def _stay_for(store: Any, rank: int, others: Sequence[int]) -> None:
    """Say that this rank knows enough; rank 0, with which the store may go, waits a little for the others to say so."""
    store.set(f"{_READ}{rank}", "1")
    deadline = monotonic() + MARGIN_SECONDS
    while rank == 0 and not store.check([f"{_READ}{each}" for each in others]) and monotonic() < deadline:
        sleep(_LOOK_SECONDS)


def within(seconds: float, call: Callable[[], Answer], is_vain: Callable[[], bool] = never) -> Answer:
    """Return what torch says through its store; raise `ConnectionError` where that says nothing for so long.

    torch waits for ever for a store whose process is stopped.
    """
    return transport.within(seconds, call, f"{STORE} does not answer: {KEEPER}", is_vain)


@contextmanager
def _joining(rank: int) -> Iterator[None]:
    """Raise what goes wrong with a store, or with connections, as a `TransportError`."""
    try:
        yield
    except (ConnectionError, dist.DistStoreError, dist.DistNetworkError) as error:
        end_in_time()
        text = str(error).splitlines()[0]
        cause = text if isinstance(error, ConnectionError) else f"{text}; {STORE} may be gone: {KEEPER}"
        raise TransportError("torch.distributed", rank, "joining the other ranks", None, cause) from error


def _open_store(timeout: timedelta) -> tuple[Any, int, int]:
    """Return the store in which the ranks meet, this rank, and how many there are."""
    where = _on_loopback(os.environ)
    if where is None:
        found: tuple[Any, int, int] = next(rendezvous("env://", timeout=timeout))
        return found
    rank, world_size, address, port = where
    listener = _listen(address, port) if rank == 0 else None
    store = TCPStore(
        address,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,  # `wait_for_all` says who is missing
        master_listen_fd=listener,
    )
    return store, rank, world_size


def _on_loopback(environment: Mapping[str, str]) -> tuple[int, int, str, int] | None:
    """Return rank, world size, address and port where the ranks make a store of their own at a loopback address."""
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in environment for name in wanted) or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None  # torch says what is missing, or torchrun has made the store
    rank, world_size, address, port = (environment[name] for name in wanted)
    if address == "localhost":
        address = "127.0.0.1"
    try:
        is_loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return None
    return (int(rank), int(world_size), address, int(port)) if is_loopback else None


def _listen(address: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_WAITING).detach()
