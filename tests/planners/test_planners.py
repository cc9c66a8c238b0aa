import pytest

from penstock.cost.ways import Way
from penstock.errors import PlanError
from penstock.network import LinearCost
from penstock.planners import PLANNERS, find_planner
from penstock.simulator.iteration import predict
from planners.instances import make_trace

TRACE = make_trace([2, 1, 3], [1, 2, 3], forward=4)
WAYS = [Way("ring", (LinearCost(1.0, 0.25),))]


@pytest.mark.parametrize(
    ("name", "messages", "seconds"),
    [  # ready at 6, 7, 10; messages of 4, 8, 12 bytes take 2, 3, 4 s alone and 1 + 24/4 = 7 s merged
        ("naive", 3, 10 + 2 + 3 + 4),
        ("wfbp", 3, 11 + 4),  # 6..8, 8..11, 11..15
        ("single", 1, 10 + 7),
        ("exact", 2, 15),  # the first two together also end at 11, with one startup less
    ],
)
def test_hand_made_timelines(name, messages, seconds):
    plan = predict(TRACE, PLANNERS[name], WAYS, workers=4)
    assert (len(plan.buckets), plan.iteration_seconds) == (messages, seconds)


def test_unknown_planners_are_named():
    with pytest.raises(
        PlanError,
        match="no planner called 'best'; wanted one of naive, wfbp, single, threshold, greedy, exact, selective, joint",
    ):
        find_planner("best")
