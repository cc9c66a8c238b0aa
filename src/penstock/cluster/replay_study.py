"""Replays several plans in turn on the same network and sets each beside its simulation."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from penstock.cluster.replay import Gradients, Replay, Replayed
from penstock.cost.ways import comparable, way_for
from penstock.network import Network
from penstock.plan import Plan
from penstock.runtime.agree_max import largest
from penstock.runtime.communicator import Communicator
from penstock.simulator.fitted import fitted_cost
from penstock.simulator.iteration import simulate_iteration
from penstock.timeline import Timeline
from penstock.trace import Trace


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One plan, replayed and simulated."""

    planner: str
    messages: int
    measured_seconds: float  # median over iterations of the slowest rank
    spread: float  # maximum - minimum over iterations
    simulated_seconds: float
    lateness: float  # median over iterations of how much the replayed computation took too long, relative

    @property
    def error(self) -> float:
        """How far the simulation is off, relative to what was measured."""
        return self.simulated_seconds / self.measured_seconds - 1

    def document(self) -> dict[str, Any]:
        """Return the row for `--json`."""
        return asdict(self) | {"error": self.error}


def replay_plans(
    trace: Trace,
    plans: Mapping[str, Plan],
    network: Network,
    communicator: Communicator,
    iterations: int,
    done: Callable[[], None] = lambda: None,
) -> tuple[list[ReplayRow], dict[str, tuple[Timeline, Timeline]]]:
    """Replay every plan `iterations` times, in turn; return rows, and each plan's (simulated, measured) timelines.

    Every rank must call this with the same arguments. The first iteration of each plan warms up and is not counted; nor
    is a second one of those that compress, as the memory they share had its final size only after the first of all.
    """
    gradients = Gradients(trace)
    replays = {name: Replay(trace, plan, communicator, gradients) for name, plan in plans.items()}
    runs: dict[str, list[Replayed]] = {name: [] for name in plans}
    slowest: dict[str, list[float]] = {name: [] for name in plans}
    start_together = partial(largest, communicator.transport, 0.0, communicator.timeout_seconds)
    try:
        _warm_up(list(replays.values()), start_together, done)
        names = list(replays)
        for turn in range(iterations):
            first = turn % max(1, len(names))  # every plan is the first in its turn
            for name in names[first:] + names[:first]:
                runs[name].append(replays[name].run(start_together))
                seconds = runs[name][-1].iteration_seconds
                slowest[name].append(largest(communicator.transport, seconds, communicator.timeout_seconds))
                done()
    finally:
        for replay in replays.values():
            replay.close()
    simulated = {name: _simulate(trace, plan, network) for name, plan in plans.items()}
    rows = [_row(trace, plans[name], runs[name], slowest[name], simulated[name]) for name in plans]
    return rows, {name: (simulated[name], runs[name][-1].timeline) for name in plans}


def _warm_up(replays: list[Replay], start_together: Callable[[], object], done: Callable[[], None]) -> None:
    for replay in replays:
        replay.run(start_together)
        done()
    for replay in replays:
        if replay.compresses:
            replay.run(start_together)


def _row(trace: Trace, plan: Plan, runs: list[Replayed], slowest: list[float], simulated: Timeline) -> ReplayRow:
    lateness = median(run.lateness_seconds for run in runs) / trace.compute_seconds if trace.compute_seconds else 0.0
    spread = max(slowest) - min(slowest)
    return ReplayRow(plan.planner, len(plan.buckets), median(slowest), spread, simulated.iteration_seconds, lateness)


def _simulate(trace: Trace, plan: Plan, network: Network) -> Timeline:
    ways = [
        way_for(network, route, None, fitted_cost) for route in dict.fromkeys(bucket.route for bucket in plan.buckets)
    ]
    return simulate_iteration(trace, plan.buckets, comparable(ways), overlap=plan.overlap)
