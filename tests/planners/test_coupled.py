"""Messages whose second round goes with the next one's first: against all partitions, played by hand."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cost.ways import Way
from penstock.network import LinearCost
from penstock.planners import PLANNERS, staged
from penstock.planners.staged import CoupledCuts
from penstock.simulator.iteration import predict
from penstock.trace import Tensor, Trace

TIE = 0.01
FIRST, SECOND = LinearCost(2.0, 0.1), LinearCost(1.0, 0.2)


def way(first=FIRST, second=SECOND, each=0.0):
    return Way("parameter_server", (first, second), codec="onebit", seconds_per_tensor=each, coupled=True)


def played(ready, prefix, ends, chosen):
    """Return when the last byte has travelled: the definition, group by group."""
    first, second = chosen.stages
    free = left = 0.0
    for start, stop in pairwise([0, *ends]):
        nbytes, each = prefix[stop] - prefix[start], chosen.seconds_per_tensor * (stop - start)
        free = max(free, ready[stop - 1]) + first.seconds(nbytes) + each + second.b_seconds_per_byte * left
        left = nbytes
    return free + second.seconds(left)


def best(ready, prefix, chosen):
    """Return the ends of the fewest messages that end about as early as any."""
    found = CoupledCuts(ready, prefix, chosen)
    return [end + 1 for end in found.ends(found.fewest(TIE))]


def partitions(count):
    """Yield the ends of the messages of every cut."""
    for bits in range(1 << (count - 1)):
        yield [*(index + 1 for index in range(count - 1) if bits >> index & 1), count]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=8),
    st.tuples(*[st.integers(0, 5)] * 4),
    st.integers(0, 2),
)
@settings(max_examples=120, deadline=None)
def test_no_cut_ends_earlier_but_for_the_tie_and_none_that_ends_as_early_has_fewer_messages(tensors, lines, each):
    ready = list(accumulate(float(gap) for gap, _ in tensors))
    prefix = list(accumulate((nbytes for _, nbytes in tensors), initial=0))
    a, b, c, d = lines
    chosen = way(LinearCost(float(a), b / 10), LinearCost(float(c), d / 10), float(each))
    found = best(ready, prefix, chosen)
    ends = {tuple(cut): played(ready, prefix, cut, chosen) for cut in partitions(len(ready))}
    earliest = min(ends.values())
    assert ends[tuple(found)] <= (1 + TIE) * earliest + 1e-9
    assert len(found) == min(len(cut) for cut, end in ends.items() if end <= (1 + TIE) * earliest + 1e-12)


def test_a_second_round_that_would_wait_for_the_last_tensor_is_cut_short():
    """One long message is ready at 10, the rest at 30: by itself, its second round would begin only then."""
    ready, prefix = [10.0, 30.0], [0, 100, 101]
    assert best(ready, prefix, way()) == [1, 2]
    assert played(ready, prefix, [1, 2], way()) == pytest.approx(30 + 2 + 0.1 + 20 + 1 + 0.2)
    assert played(ready, prefix, [2], way()) == pytest.approx(30 + 2 + 10.1 + 1 + 20.2)


def test_many_tensors_are_glued_and_lose_at_most_a_grain(monkeypatch):
    ready = [0.01 * index for index in range(1, 401)]
    prefix = list(range(401))
    line = way(LinearCost(0.05, 0.004), LinearCost(0.05, 0.004))

    def end():
        return played(ready, prefix, best(ready, prefix, line), line)

    glued = end()
    monkeypatch.setattr(staged, "MOST", 400)
    assert glued <= end() * (1 + TIE) + (ready[-1] + 0.008 * 400) / staged.COUPLED_GRAINS


def trace_of(ready, prefix):
    """Return a trace of tensors of as many elements of two bytes as `prefix` has pairs of bytes."""
    times = (after - before for before, after in pairwise([0.0, *ready]))
    sizes = ((stop - start) // 2 for start, stop in pairwise(prefix))
    tensors = (Tensor(f"t{index}", *each) for index, each in enumerate(zip(sizes, times, strict=True)))
    return Trace("toy", "a GPU", 1, "float16", 0.0, tuple(tensors))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=8),
    st.tuples(*[st.integers(0, 5)] * 4),
)
@settings(max_examples=40, deadline=None)
def test_the_simulator_plays_groups_of_messages_as_they_are_defined(tensors, lines):
    ready = list(accumulate(float(gap) for gap, _ in tensors))
    prefix = list(accumulate((2 * nbytes for _, nbytes in tensors), initial=0))
    a, b, c, d = lines
    chosen = way(LinearCost(float(a), b / 10), LinearCost(float(c), d / 10))
    plan = predict(trace_of(ready, prefix), PLANNERS["exact"], [chosen], 2)
    ends = list(accumulate(len(bucket.tensors) for bucket in plan.buckets))
    assert plan.iteration_seconds == pytest.approx(played(ready, prefix, ends, chosen))
    assert ends == best(ready, prefix, chosen)


def test_a_dense_way_beside_a_coupled_one_is_taken_where_it_ends_earlier():
    ready, prefix = [1.0, 2.0], [0, 100, 200]
    fast, slow = Way("native", (LinearCost(0.1, 0.001),)), Way("native", (LinearCost(0.1, 9.0),))
    for dense, codec in ((fast, None), (slow, "onebit")):
        for planner in ("exact", "joint"):
            plan = predict(trace_of(ready, prefix), PLANNERS[planner], [dense, way()], 2)
            assert {bucket.codec for bucket in plan.buckets} == {codec}
