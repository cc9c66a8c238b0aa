import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost.ways import Way
from penstock.errors import PlanError
from penstock.network import LinearCost
from penstock.planners import find_planner
from penstock.planners.rules import FIRST_NBYTES, NEXT_NBYTES, plan_threshold
from planners.instances import make_trace

WAYS = [Way("ring", (LinearCost(1.0, 1.0),))]
MIB = 1 << 18  # elements of float32 in a MiB


def test_the_tensor_that_reaches_the_limit_still_fits():
    trace = make_trace([1] * 5, [MIB // 2, MIB, 20 * MIB, 10 * MIB, MIB])
    assert [len(bucket.tensors) for bucket in plan_threshold(trace, WAYS)] == [2, 2, 1]


def test_one_tensor_is_one_bucket():
    assert len(plan_threshold(make_trace([1], [0]), WAYS)) == 1


@given(st.lists(st.integers(0, 12 * MIB), min_size=1, max_size=30))
def test_buckets_are_those_of_torch(numels):
    """The oracle is torch's own assignment, through its private but long-lived helper."""
    distributed = pytest.importorskip("torch.distributed")
    torch = pytest.importorskip("torch")
    tensors = [torch.empty(numel, device="meta") for numel in numels]
    assigned, _ = distributed._compute_bucket_assignment_by_size(tensors, [FIRST_NBYTES, NEXT_NBYTES])
    ours = plan_threshold(make_trace([1] * len(numels), numels), WAYS)
    assert [[int(name[1:]) for name in bucket.tensors] for bucket in ours] == [list(bucket) for bucket in assigned]


def test_a_planner_with_a_name_of_thousands_of_letters_is_one_short_line():
    with pytest.raises(PlanError) as raised:
        find_planner("e" + "(" * 5000)
    assert len(str(raised.value)) < 400
