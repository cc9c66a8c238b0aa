"""Messages whose second round goes with the next one's first: against all partitions, played by hand."""

import math
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cost.ways import Way, way_for
from penstock.network import LinearCost, Network
from penstock.planners import PLANNERS, staged
from penstock.planners.staged import CoupledCuts
from penstock.simulator.iteration import predict
from penstock.trace import Tensor, Trace

TIE = 0.01
FIRST, SECOND = LinearCost(2.0, 0.1), LinearCost(1.0, 0.2)


def way(first=FIRST, second=SECOND, each=0.0, most=math.inf):
    stages = first, second
    return Way("parameter_server", stages, codec="onebit", seconds_per_tensor=each, coupled=True, most_nbytes=most)


def played(ready, prefix, ends, chosen):
    """Return when the last byte has travelled: the definition, group by group."""
    first, second = chosen.stages
    free = left = 0.0
    for start, stop in pairwise([0, *ends]):
        nbytes, each = prefix[stop] - prefix[start], chosen.seconds_per_tensor * (stop - start)
        free = max(free, ready[stop - 1]) + each + first.seconds(nbytes) + second.b_seconds_per_byte * left
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


def is_small(prefix, ends, most):
    """Say whether no message has several tensors of more than `most` bytes together."""
    return all(prefix[stop] - prefix[start] <= most or stop == start + 1 for start, stop in pairwise([0, *ends]))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=8),
    st.tuples(*[st.integers(0, 5)] * 4),
    st.integers(0, 2),
    st.sampled_from([math.inf, 50, 12]),
)
@settings(max_examples=200, deadline=None)
def test_no_cut_ends_earlier_but_for_the_tie_and_none_that_ends_as_early_has_fewer_messages(tensors, lines, each, most):
    ready = list(accumulate(float(gap) for gap, _ in tensors))
    prefix = list(accumulate((nbytes for _, nbytes in tensors), initial=0))
    a, b, c, d = lines
    chosen = way(LinearCost(float(a), b / 10), LinearCost(float(c), d / 10), float(each), most)
    found = best(ready, prefix, chosen)
    ends = {tuple(cut): played(ready, prefix, cut, chosen) for cut in partitions(len(ready))}
    kept = {cut: end for cut, end in ends.items() if is_small(prefix, cut, most)}
    if min(kept.values()) <= (1 + staged.APART) * min(ends.values()):
        ends = kept
    earliest = min(ends.values())
    assert ends[tuple(found)] <= (1 + TIE) * earliest + 1e-9
    assert len(found) == min(len(cut) for cut, end in ends.items() if end <= (1 + TIE) * earliest + 1e-12)


def test_a_second_round_that_would_wait_for_the_last_tensor_is_cut_short():
    """One long message is ready at 10, the rest at 30: by itself, its second round would begin only then."""
    ready, prefix = [10.0, 30.0], [0, 100, 101]
    assert best(ready, prefix, way()) == [1, 2]
    assert played(ready, prefix, [1, 2], way()) == pytest.approx(30 + 2 + 0.1 + 20 + 1 + 0.2)
    assert played(ready, prefix, [2], way()) == pytest.approx(30 + 2 + 10.1 + 1 + 20.2)


def test_tensors_are_not_put_together_beyond_a_limit_unless_that_costs_too_much(monkeypatch):
    ready, prefix = [1.0, 1.1, 1.2, 1.3, 400.0], [0, 10, 20, 30, 40, 41]
    line = way(LinearCost(0.1, 0.1), LinearCost(0.1, 0.1), most=30)
    assert best(ready, prefix, line) == [3, 5]
    assert best(ready, prefix, replace(line, most_nbytes=40)) == [4, 5]
    monkeypatch.setattr(staged, "MOST_MESSAGES", 2)
    slow, small = [10 * each for each in prefix], replace(line, most_nbytes=150)
    assert best(ready, slow, small) == [4, 5]  # else, by hand, 301 of 401 bytes would be left at the end, not one


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
@settings(max_examples=60, deadline=None)
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


def played_in_rounds(ready, nbytes, line, rounds):
    """Return when all buckets have travelled: with each one comes a group of messages, a round of all under way."""
    free, under_way = 0.0, []
    for moment, own in [*zip(ready, nbytes, strict=True), *[(0.0, None)] * (rounds - 1)]:
        under_way = [[size, left - 1] for size, left in under_way if left > 1]
        under_way += [] if own is None else [[own, rounds]]
        carried = sum(size for size, _ in under_way)
        free = max(free, moment) + (line.a_seconds + line.b_seconds_per_byte * carried) / rounds
    return free


def measured(line):
    """Return the way of a route whose line was measured."""
    route = "gtopk+sparse(density=0.01)"
    return way_for(Network(4, 0.0, 0.0, 0.0, all_reduce={route: line}), route)


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 6])
def test_a_way_in_several_rounds_starts_as_many_groups_of_messages_as_are_queued(rounds):
    """gTop-k's tree has 2 ceil(log2 N) rounds."""
    line = LinearCost(12.0, 0.6, rounds=rounds)
    chosen = measured(line)
    assert (chosen.coupled, chosen.seconds(10)) == (rounds > 1, pytest.approx(18.0))
    plan = predict(trace_of([1e-9, 2e-9, 3e-9], [0, 40, 80, 120]), PLANNERS["wfbp"], [chosen], 4)
    assert plan.iteration_seconds == pytest.approx(played_in_rounds([0.0] * 3, [40] * 3, line, rounds))


def test_of_three_rounds_the_last_of_a_bucket_before_the_last_is_predicted_a_bucket_too_early():
    ready, line = [100.0, 200.0, 300.0], LinearCost(12.0, 0.3, rounds=3)
    plan = predict(trace_of(ready, [0, 40, 80, 120]), PLANNERS["wfbp"], [measured(line)], 4)
    found = played_in_rounds(ready, [40] * 3, line, 3) - plan.iteration_seconds
    assert found == pytest.approx(40 * 0.3 / 3)  # the first bucket's, which waits for the third
