"""The slowdown of messages, found again from iterations whose slowdown is known."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import torch_training as training
from penstock.cost.ways import Way
from penstock.network import LinearCost
from penstock.plan import Route, cut_into_buckets
from penstock.planners import Planner
from penstock.planning.observed import MOST, Between, Sending, bucket_nbytes, message_slowdown
from penstock.simulator.iteration import predict
from penstock.timeline import COMPUTE, Span, Timeline
from penstock.trace import Tensor, Trace
from spawn import spawn

TRACE = Trace("toy", "none", 1, "float32", 1.0, tuple(Tensor(f"t{i}", 25, 1.0) for i in range(4)))  # ready at 2 to 5
LINE = LinearCost(0.0, 0.01)  # a second for each tensor


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0.1, 10)), min_size=2, max_size=12),
    st.builds(LinearCost, st.floats(0.01, 5), st.floats(0, 1e-3)),
    st.floats(1, MOST),
    st.data(),
)
def test_the_slowdown_of_a_simulated_iteration_is_found(tensors, line, slowdown, data):
    trace = Trace("random", "none", 1, "float32", 1.0, tuple(Tensor(f"t{i}", *each) for i, each in enumerate(tensors)))
    last = len(tensors) - 1
    ends = [*sorted(data.draw(st.sets(st.integers(0, last - 1)))), last]
    buckets = cut_into_buckets(trace, ends, [Route("w")] * len(ends))
    stock = Planner("stock", lambda *_: buckets, True, "")
    ended, sooner = (predict(trace, stock, [Way("w", (line,))], 2, s).iteration_seconds for s in (slowdown, 1.0))
    assume(ended > 1.06 * sooner)  # else it is not looked for
    found = message_slowdown(trace, [bucket.nbytes for bucket in buckets], line, ended)
    assert found == pytest.approx(slowdown, rel=1e-3)


def test_messages_that_nothing_delays_are_not_slowed():
    assert message_slowdown(TRACE, [100, 300], LINE, 8.0) == 1.0  # the second is sent when computing ends
    assert message_slowdown(TRACE, [100, 300], LINE, 7.5) == 1.0  # sooner than predicted
    assert message_slowdown(TRACE, [100, 300], LINE, 8.1) == 1.0  # a little later, for whatever reason


@pytest.mark.parametrize(("end_seconds", "slowdown"), [(6.0, 1.0), (7.0, 1.5), (8.0, 3.0), (8.5, MOST), (99.0, MOST)])
def test_the_later_messages_end_the_more_they_were_slowed(end_seconds, slowdown):
    assert message_slowdown(TRACE, [100] * 4, LINE, end_seconds) == slowdown


def iteration(end_seconds):
    return Timeline((Span("backward", COMPUTE, 0.0, 5.0), Span("all", "network", 2.0, end_seconds)))


def test_iterations_count_from_when_torch_has_its_final_buckets():
    sending = Sending()
    sending.note({"bucket_sizes": "400"}, iteration(20.0))
    for end_seconds in (7.0, 7.0, 30.0):
        sending.note({"bucket_sizes": "400", "rebuilt_bucket_sizes": "100, 100, 100, 100"}, iteration(end_seconds))
    assert (sending.nbytes, sending.ends) == ((100, 100, 100, 100), [7.0, 7.0, 30.0])
    assert sending.slowdown(TRACE, LINE) == 1.5


def test_where_nothing_is_known_messages_are_not_slowed():
    sending = Sending()
    sending.note({}, iteration(9.0))
    sending.note({"bucket_sizes": "400"}, None)
    assert sending.slowdown(TRACE, LINE) == 1.0
    sending.note({"bucket_sizes": "400"}, iteration(99.0))
    assert sending.slowdown(TRACE, None) == 1.0  # the engine's own all-reduce was not measured


def test_buckets_may_hold_tensors_that_the_trace_lacks():
    assert message_slowdown(TRACE, [100, 300, 50], LINE, 99.0) == MOST


def test_a_wrapper_that_says_nothing_of_buckets_has_none():
    assert bucket_nbytes({}) == ()


def test_rank_0_watches_what_profiled_iterations_send():
    (sent, iterations, nbytes, slowdown), (_, others, _, agreed) = spawn(2, training.watch_sending)
    assert (sent, iterations) == (nbytes, 4)
    assert others == 0
    assert slowdown == agreed == 1.0  # the network that was given is slower than this


def test_what_lies_between_the_last_message_and_the_next_forward_pass_is_the_optimizers_step():
    """Iterations that send until 1.0 s after their forward pass begins, 0.2 s of other work between them."""
    between, timeline = Between(), Timeline((Span("backward", COMPUTE, 0.0, 0.7), Span("all", "network", 0.5, 1.0)))
    assert between.seconds == 0.0
    for now in (5.0, 6.2, 7.4, 8.7):  # the last was disturbed
        between.note(timeline, now)
    assert between.seconds == pytest.approx(0.2)
    between.note(None, 20.0)  # torch did not time it
    between.note(timeline, 21.2)
    assert len(between.found) == 3
