"""A `Way`: how a bucket can travel and what that costs; planners choose among ways without knowing more."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.cost.collectives import ALL_REDUCE, CostFunction, parameter_server
from penstock.errors import NetworkError
from penstock.network import LinearCost, Network

PARAMETER_SERVER = "parameter_server"


@dataclass(frozen=True, slots=True)
class Way:
    """One way of synchronising a bucket."""

    strategy: str
    stages: tuple[LinearCost, ...]  # one for an all-reduce; push and pull for parameter servers
    lanes: tuple[str, ...] = ("network",)  # the resource each stage occupies, in timelines
    measured: bool = False  # False: computed from alpha, beta, gamma

    @property
    def whole(self) -> LinearCost:
        """All stages one after the other, as one line."""
        total = self.stages[0]
        for stage in self.stages[1:]:
            total = total + stage
        return total


def way_for(network: Network, strategy: str, workers: int | None = None) -> Way:
    """Return the way called `strategy` on `network` with `workers` workers (default: the network's own number).

    A measured line of the network holds for the number of workers it was measured with; for any other number, and for
    strategies that were not measured, the closed form is used.
    """
    strategy = strategy if strategy in network.all_reduce else strategy.replace("-", "_")
    p = network.workers if workers is None else workers
    if p < 1:
        raise NetworkError(f"{p} workers; wanted at least 1")
    if strategy in network.all_reduce and p == network.workers:
        return Way(strategy, (network.all_reduce[strategy],), measured=True)
    if strategy == PARAMETER_SERVER:
        return Way(strategy, parameter_server(network, p), ("push", "pull"))
    if strategy in ALL_REDUCE:
        return Way(strategy, (ALL_REDUCE[strategy](network, p),))
    raise NetworkError(_unknown(network, strategy, p, ALL_REDUCE))


def _unknown(network: Network, strategy: str, p: int, known: Mapping[str, CostFunction]) -> str:
    if strategy in network.all_reduce:
        return (
            f"network {network.name!r} measured {strategy!r} with {network.workers} workers, and it has no closed form "
            f"for {p}; use --workers {network.workers} or one of {', '.join([*known, PARAMETER_SERVER])}"
        )
    measured = ", ".join(network.all_reduce) or "none"
    names = ", ".join([*known, PARAMETER_SERVER])
    return f"no all-reduce called {strategy!r}; measured in network {network.name!r}: {measured}; closed forms: {names}"
