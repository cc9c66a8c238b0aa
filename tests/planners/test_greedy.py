import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost.ways import Way
from penstock.network import LinearCost
from penstock.planners.rules import plan_greedy
from planners.instances import make_trace, traces, ways
from planning_time import greedy_ends_as_published


def ends_of(buckets):
    ends, held = [], -1
    for bucket in buckets:
        held += len(bucket.tensors)
        ends.append(held)
    return ends


@given(traces(40), ways())
def test_one_pass_decides_as_algorithm_1_does(trace, options):
    line = options[0].whole
    published = greedy_ends_as_published(trace.ready_seconds, trace.nbytes, line.a_seconds, line.b_seconds_per_byte)
    assert ends_of(plan_greedy(trace, options)) == published


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 10**6)), min_size=1, max_size=60),
    st.floats(0, 1),
    st.floats(0, 1e-6),
)
def test_and_on_any_floats(tensors, a, b):
    trace = make_trace([gap for gap, _ in tensors], [size for _, size in tensors])
    published = greedy_ends_as_published(trace.ready_seconds, trace.nbytes, a, b)
    assert ends_of(plan_greedy(trace, [Way("ring", (LinearCost(a, b),))])) == published


@pytest.mark.parametrize(
    ("gap", "messages"),
    [(0.5, 1), (0.999, 1), (1.0, 3), (5.0, 3)],  # merged if the next gradient comes less than a startup later
)
def test_merges_what_is_ready_less_than_a_startup_later(gap, messages):
    trace = make_trace([1.0, gap, gap], [1, 1, 1])
    assert len(plan_greedy(trace, [Way("ring", (LinearCost(1.0, 0.0),))])) == messages
