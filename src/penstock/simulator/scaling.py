"""Scaling studies: the iteration on 4, 8, ... 2,048 workers, planner by planner.

Weak scaling: every worker keeps its batch, so speed-up is `p x (compute on one worker) / iteration` and efficiency is
speed-up over p (MG-WFBP Eq. 4-5).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from penstock.cost.ways import Way, comparable, way_for, ways_for
from penstock.errors import PlanError
from penstock.network import Network
from penstock.planners import Planner
from penstock.simulator.fitted import fitted_cost
from penstock.simulator.iteration import simulate_iteration
from penstock.trace import Trace


@dataclass(frozen=True, slots=True)
class Variation:
    """Workers that are not all equally fast.

    In every iteration each worker's computation is stretched by its own factor: log-normal with mean 1 and standard
    deviation `jitter`, times `straggler` for the first `stragglers` workers. A synchronous collective waits for the
    slowest, so gradients are ready when the slowest worker's are.
    """

    jitter: float = 0.0  # relative standard deviation of a worker's iteration
    straggler: float = 1.0  # how many times slower the slow workers are
    stragglers: int = 0  # how many workers are slow
    iterations: int = 20  # simulated and averaged
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.jitter) and self.jitter >= 0):
            raise PlanError(f"jitter is {self.jitter}; wanted a finite number >= 0")
        if not (math.isfinite(self.straggler) and self.straggler >= 1):
            raise PlanError(f"straggler is {self.straggler}; wanted a factor >= 1")
        if self.stragglers < 0 or self.iterations < 1:
            raise PlanError(f"{self.stragglers} stragglers, {self.iterations} iterations; wanted >= 0 and >= 1")

    def slowest_factors(self, workers: int) -> list[float]:
        """Return, for each iteration, the factor of the slowest worker."""
        if self.stragglers > workers:
            raise PlanError(f"{self.stragglers} stragglers among {workers} workers; wanted at most as many")
        sigma = math.sqrt(math.log1p(self.jitter**2))
        draws = np.random.default_rng([self.seed, workers]).normal(
            -sigma * sigma / 2, sigma, (self.iterations, workers)
        )
        factors = np.exp(draws)
        factors[:, : self.stragglers] *= self.straggler
        return [float(factor) for factor in factors.max(axis=1)]


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """One planner on one number of workers."""

    workers: int
    planner: str
    messages: int
    routes: tuple[str, ...]  # by which its messages go, in the order they are first taken
    iteration_seconds: float  # mean over iterations where workers vary
    non_overlapped_seconds: float
    speedup: float
    efficiency: float
    cost: str  # "measured" line, "model" (closed form) or "simulated" program

    def document(self) -> dict[str, Any]:
        """Return the row for `--json`."""
        return asdict(self)


def scaling_study(
    trace: Trace,
    network: Network,
    workers: Iterable[int],
    planners: Sequence[Planner],
    strategy: str,
    variation: Variation | None = None,
    codecs: Sequence[str] = (),
) -> list[ScalingRow]:
    """Simulate every planner on every number of workers; with `codecs`, those that choose may compress."""
    found = {p: _ways(network, strategy, codecs, p) for p in workers}
    return [_row(trace, planner, ways, p, variation) for p, ways in found.items() for planner in planners]


def _ways(network: Network, strategy: str, codecs: Sequence[str], p: int) -> list[Way]:
    """Return the dense way first: planners that take one way for all take the first."""
    if not codecs:
        return [way_for(network, strategy, p, fitted_cost)]
    return comparable(ways_for(network, [strategy], codecs, workers=p, estimate=fitted_cost))


def _row(trace: Trace, planner: Planner, ways: Sequence[Way], p: int, variation: Variation | None) -> ScalingRow:
    buckets = planner.buckets(trace, ways)
    factors = variation.slowest_factors(p) if variation else [1.0]
    runs = [
        simulate_iteration(
            trace, buckets, ways, overlap=planner.overlap, ready_seconds=[f * r for r in trace.ready_seconds]
        )
        for f in factors
    ]
    seconds = fmean(run.iteration_seconds for run in runs)
    speedup = p * trace.compute_seconds / seconds if seconds else float(p)
    return ScalingRow(
        workers=p,
        planner=planner.name,
        messages=len(buckets),
        routes=tuple(dict.fromkeys(str(bucket.route) for bucket in buckets)),
        iteration_seconds=seconds,
        non_overlapped_seconds=fmean(run.non_overlapped_seconds for run in runs),
        speedup=speedup,
        efficiency=speedup / p,
        cost=" or ".join(dict.fromkeys("model" if way.source == "closed form" else way.source for way in ways)),
    )
