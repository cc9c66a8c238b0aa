"""Planners decide which gradients travel together. Each is a function of values; none knows the simulator.

A planner takes a trace and the ways a bucket can travel and returns buckets in sending order. `exact` and `joint` pick
the best way for each bucket (`joint` among ways of all kinds), `selective` for each tensor by itself. All others use
the first way for every bucket and exist to be compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.cost.ways import Way
from penstock.errors import PlanError, did_you_mean, shorten
from penstock.plan import Bucket
from penstock.planners.exact import plan_exact, plan_joint
from penstock.planners.rules import plan_greedy, plan_single, plan_threshold, plan_wfbp
from penstock.planners.selective import plan_selective
from penstock.trace import Trace

PlanFunction = Callable[[Trace, Sequence[Way]], tuple[Bucket, ...]]


@dataclass(frozen=True, slots=True)
class Planner:
    """A function that makes a plan's buckets, with its name and what it is, for people."""

    name: str
    buckets: PlanFunction
    overlap: bool  # may sending begin while the backward pass runs?
    summary: str


PLANNERS: dict[str, Planner] = {
    planner.name: planner
    for planner in (
        Planner("naive", plan_wfbp, False, "one message per tensor, sent after the whole backward pass"),
        Planner("wfbp", plan_wfbp, True, "one message per tensor, sent as soon as it is ready"),
        Planner("single", plan_single, True, "one message with everything (SyncEASGD)"),
        Planner("threshold", plan_threshold, True, "stock DDP: 1 MiB first, then buckets of 25 MiB"),
        Planner("greedy", plan_greedy, True, "MG-WFBP Algorithm 1 as published"),
        Planner("exact", plan_exact, True, "the optimum"),
        Planner(
            "selective", plan_selective, True, "HiPress: the fastest way of each tensor by itself, one message each"
        ),
        Planner("joint", plan_joint, True, "the optimum over strategies, codecs and partitions at once"),
    )
}


def find_planner(name: str) -> Planner:
    """Return the planner called `name`."""
    if name not in PLANNERS:
        raise PlanError(
            f"no planner called {shorten(name)}; wanted one of {', '.join(PLANNERS)}{did_you_mean(name, PLANNERS)}"
        )
    return PLANNERS[name]
