"""Runs one function per rank, each on a thread of its own, over the memory engine."""

import threading
from collections.abc import Callable
from typing import Any

from penstock.runtime.transport.memory import Fabric, MemoryTransport


def run_ranks(world_size: int, function: Callable[[MemoryTransport], Any], fabric: Fabric | None = None) -> list[Any]:
    """Return what each rank returned; raise what the first failing one raised."""
    results = outcomes(world_size, function, fabric)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def outcomes(world_size: int, function: Callable[[MemoryTransport], Any], fabric: Fabric | None = None) -> list[Any]:
    """Return what each rank returned or raised; no thread outlives the call."""
    shared = fabric or Fabric(world_size)
    results: list[Any] = [None] * world_size

    def body(rank: int) -> None:
        try:
            results[rank] = function(shared.transport(rank))
        except BaseException as error:  # pytest's own failures are no exceptions
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a rank hangs"
    return results
