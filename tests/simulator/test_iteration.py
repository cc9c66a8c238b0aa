"""The event engine against the closed forms of MG-WFBP, Eq. 6-9 and 24-25."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost.ways import Way
from penstock.errors import PlanError
from penstock.network import LinearCost
from penstock.plan import Bucket, Route, cut_into_buckets
from penstock.planners import PLANNERS
from penstock.simulator.iteration import predict, simulate_iteration
from penstock.trace import Tensor, Trace
from planners.oracle import schedule_seconds

times = st.floats(0, 10)
lines = st.builds(LinearCost, st.floats(0, 5), st.floats(0, 1e-3))


@st.composite
def problems(draw):
    tensors = draw(st.lists(st.tuples(st.integers(0, 5000), times), min_size=1, max_size=20))
    trace = Trace(
        "random", "none", 1, "float32", draw(times), tuple(Tensor(f"t{i}", n, t) for i, (n, t) in enumerate(tensors))
    )
    ends = sorted(draw(st.sets(st.integers(0, len(tensors) - 2)))) if len(tensors) > 1 else []
    return trace, [*ends, len(tensors) - 1]


@given(problems(), lines)
def test_equation_7_message_by_message(problem, line):
    trace, ends = problem
    timeline = simulate_iteration(trace, cut_into_buckets(trace, ends, [Route("w")] * len(ends)), [Way("w", (line,))])
    expected = schedule_seconds(trace, ends, [(line,)] * len(ends))
    assert timeline.iteration_seconds == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert timeline.compute_seconds == pytest.approx(trace.compute_seconds, rel=1e-9, abs=1e-9)


@given(problems(), lines, lines)
def test_push_of_one_bucket_overlaps_pull_of_the_one_before(problem, push, pull):
    trace, ends = problem
    way = Way("ps", (push, pull), ("push", "pull"))
    timeline = simulate_iteration(trace, cut_into_buckets(trace, ends, [Route("ps")] * len(ends)), [way])
    expected = schedule_seconds(trace, ends, [(push, pull)] * len(ends))
    assert timeline.iteration_seconds == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(problems(), lines)
def test_equations_3_8_and_9(problem, line):
    trace, _ = problem
    ways = [Way("w", (line,))]
    each = [line.seconds(nbytes) for nbytes in trace.nbytes]
    naive = trace.forward_seconds + trace.backward_seconds + sum(each)
    single = trace.forward_seconds + trace.backward_seconds + line.seconds(sum(trace.nbytes))
    communicated = 0.0
    for ready, seconds in zip(trace.ready_seconds, each, strict=True):
        communicated = max(communicated, ready) + seconds
    for name, expected in (("naive", naive), ("single", single), ("wfbp", communicated)):
        plan = predict(trace, PLANNERS[name], ways, workers=2)
        assert plan.iteration_seconds == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert plan.non_overlapped_seconds == pytest.approx(expected - trace.compute_seconds, rel=1e-9, abs=1e-8)


def test_a_timeline_drawn_by_hand():
    """Forward 0-2, t0 2-3, t1 3-5; messages of 4 and 8 bytes take 2 and 3 s.

    compute  |fwd fwd|t0|t1 t1|
    network              |0 0|1 1 1|        t0 leaves at 3, t1 is ready at 5 and leaves at once
    """
    trace = Trace("toy", "paper", 1, "float32", 2.0, (Tensor("t0", 1, 1.0), Tensor("t1", 2, 2.0)))
    plan = predict(trace, PLANNERS["wfbp"], [Way("ring", (LinearCost(1.0, 0.25),))], workers=2)
    spans = [(s.name, s.lane, s.start_seconds, s.end_seconds) for s in plan.timeline.spans]
    assert spans == [
        ("forward", "compute", 0.0, 2.0),
        ("t0", "compute", 2.0, 3.0),
        ("t1", "compute", 3.0, 5.0),
        ("t0", "network", 3.0, 5.0),
        ("t1", "network", 5.0, 8.0),
    ]
    assert (plan.iteration_seconds, plan.non_overlapped_seconds) == (8.0, 3.0)


def test_plans_that_do_not_fit_are_refused():
    trace = Trace("toy", "paper", 1, "float32", 0.0, (Tensor("t0", 1, 1.0),))
    ways = [Way("ring", (LinearCost(1.0, 0.0),))]
    with pytest.raises(PlanError, match="plan holds tensor 'x', which trace 'toy' does not have"):
        simulate_iteration(trace, [Bucket(("x",), 4, "ring")], ways)
    with pytest.raises(PlanError, match="wants strategy 'tree'; known here: ring"):
        simulate_iteration(trace, [Bucket(("t0",), 4, "tree")], ways)
