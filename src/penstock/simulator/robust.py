"""The plan to run, where several are predicted to take about the same time.

Predictions of compressed iterations are a few per cent off on a machine whose cores all ranks share, now one way, now
the other. A schedule of several messages that is predicted to gain less than 1% over one message gains nothing that can
be seen, and loses whatever messages cost that was not.
"""

from collections.abc import Sequence

from penstock.cost.ways import Way
from penstock.plan import Plan
from penstock.planners import PLANNERS, Planner
from penstock.simulator.iteration import predict
from penstock.trace import Trace

TIE = 0.01  # of the predicted iteration


def predict_robust(trace: Trace, planner: Planner, ways: Sequence[Way], workers: int) -> Plan:
    """Return the plan with the fewest messages among those predicted within `TIE` of what `planner` finds best.

    Beside it, one message by each way, and the planner's choice with each way by itself, are considered.
    """
    best = predict(trace, planner, ways, workers)
    others = [predict(trace, each, [way], workers) for way in ways for each in (PLANNERS["single"], planner)]
    close = [plan for plan in (best, *others) if plan.iteration_seconds <= (1 + TIE) * best.iteration_seconds]
    return min(close, key=lambda plan: (len(plan.buckets), plan.iteration_seconds))
