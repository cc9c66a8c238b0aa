"""The plan to run, where several are predicted to take about the same time.

Predictions of compressed iterations are a few per cent off on a machine whose cores all ranks share, now one way, now
the other. A schedule of several messages that is predicted to gain less than 1% over one message gains nothing that can
be seen, and loses whatever messages cost that was not.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.cost.ways import Way
from penstock.plan import Plan
from penstock.planners import PLANNERS, Planner
from penstock.simulator.iteration import predict
from penstock.trace import Trace

TIE = 0.01  # of the predicted iteration


def predict_robust(trace: Trace, planner: Planner, ways: Sequence[Way], workers: int, slowdown: float = 1.0) -> Plan:
    """Return the plan with the fewest messages among those predicted within `TIE` of the best.

    Besides what `planner` finds, one message by each way, and the planner's choice with each way by itself, are
    considered: what comes of it is never more than `TIE` behind any single choice.
    """
    one = replace(planner, buckets=PLANNERS["single"].buckets)  # under the same name
    others = [predict(trace, each, [way], workers, slowdown) for way in ways for each in (one, planner)]
    plans = [predict(trace, planner, ways, workers, slowdown), *others]
    best = min(plan.iteration_seconds for plan in plans)
    close = [plan for plan in plans if plan.iteration_seconds <= (1 + TIE) * best]
    return min(close, key=lambda plan: (len(plan.buckets), plan.iteration_seconds))
