"""Worlds whose ranks are threads of one process."""

import threading
from collections.abc import Callable
from typing import Any

from penstock.adaptor.world import World
from penstock.runtime.launch import Place
from penstock.runtime.transport.memory import Fabric
from runtime.threads import outcomes


class Fabrics:
    """The k-th transport that a rank asks for is of the k-th fabric, on all ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size, self._made, self._lock = world_size, list[Fabric](), threading.Lock()

    def number(self, index: int) -> Fabric:
        with self._lock:
            while len(self._made) <= index:
                self._made.append(Fabric(self._world_size))
            return self._made[index]

    def kill(self, rank: int) -> None:
        for fabric in self._made:
            fabric.kill(rank)


def run_worlds(world_size: int, function: Callable[[World], Any], timeout_seconds: float = 60.0) -> list[Any]:
    """Return what `function` returned on each rank; raise what the first failing one raised."""
    results = world_outcomes(world_size, function, timeout_seconds)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def world_outcomes(
    world_size: int,
    function: Callable[[World], Any],
    timeout_seconds: float = 60.0,
    fabrics: Fabrics | None = None,
) -> list[Any]:
    """Return what `function` returned or raised on each rank."""
    shared = fabrics or Fabrics(world_size)

    def rank(transport: Any) -> Any:
        made = iter(range(1000))
        place = Place(transport.rank, world_size, transport.rank, world_size)
        world = World(
            place,
            "memory",
            lambda: shared.number(next(made)).transport(transport.rank),
            timeout_seconds=timeout_seconds,
        )
        return function(world)

    return outcomes(world_size, rank)
