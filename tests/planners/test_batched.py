from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cost.ways import Way
from penstock.errors import PlanError
from penstock.network import LinearCost
from penstock.plan import Plan, cut_into_buckets
from penstock.planners import PLANNERS
from penstock.planners.batched import best_bulks, plan_batched
from penstock.simulator.iteration import simulate_iteration
from planners.instances import codec_ways, make_trace, staged_ways, traces


def seconds(trace, buckets, options):
    return simulate_iteration(trace, buckets, options).iteration_seconds


def alone(trace, options):
    """Return each tensor's way, by definition."""
    costs = [[way.seconds(nbytes) for way in options] for nbytes in trace.nbytes]
    return [options[each.index(min(each))] for each in costs]


def best_batching_seconds(trace, chosen):
    """Try every set of boundaries that keeps neighbours with different ways apart."""
    ready, sizes, count = trace.ready_seconds, trace.nbytes, len(chosen)
    best = float("inf")
    for cuts in product([False, True], repeat=count - 1):
        ends = [i for i in range(count - 1) if cuts[i]] + [count - 1]
        now, start = 0.0, 0
        for end in ends:
            if len({way.route for way in chosen[start : end + 1]}) > 1:
                break
            now = max(now, ready[end]) + chosen[end].seconds(sum(sizes[start : end + 1]), end + 1 - start)
            start = end + 1
        else:
            best = min(best, max(now, ready[-1]))
    return best


@given(traces(7), codec_ways(4))
@settings(max_examples=300)
def test_equals_brute_force_over_all_batchings_of_these_decisions(trace, options):
    buckets = plan_batched(trace, options)
    chosen = alone(trace, options)
    assert [bucket.route for bucket in buckets for _ in bucket.tensors] == [way.route for way in chosen]
    assert seconds(trace, buckets, options) == best_batching_seconds(trace, chosen)


@given(traces(30), codec_ways(6))
@settings(max_examples=200)
def test_is_never_slower_than_one_message_each_and_never_faster_than_joint(trace, options):
    found = seconds(trace, plan_batched(trace, options), options)
    assert found <= seconds(trace, PLANNERS["selective"].buckets(trace, options), options)
    assert found >= seconds(trace, PLANNERS["joint"].buckets(trace, options), options)


@given(traces(20), codec_ways(1))
def test_with_one_way_it_is_the_optimum_of_that_way_with_as_few_messages(trace, options):
    found, best = plan_batched(trace, options), PLANNERS["exact"].buckets(trace, options)
    assert seconds(trace, found, options) == seconds(trace, best, options)
    assert len(found) == len(best)


@given(
    traces(7), codec_ways(2), st.lists(st.tuples(st.booleans(), st.booleans()), min_size=7, max_size=7), st.booleans()
)
@settings(max_examples=100)
def test_bulks_equal_brute_force_over_all_runs_of_a_plans_buckets(trace, options, drawn, overlap):
    count = len(trace.tensors)
    ends = [i for i in range(count) if drawn[i][0] or i == count - 1]
    buckets = cut_into_buckets(trace, ends, [options[drawn[i][1] % len(options)].route for i in ends])
    plan = Plan("m", 2, "any", buckets, overlap)

    def taken(bulks):
        try:
            return simulate_iteration(trace, replace(plan, bulks=bulks).messages, options, overlap=overlap)
        except PlanError:  # of two routes
            return None

    best = min(found.iteration_seconds for bulks in _compositions(len(buckets)) if (found := taken(bulks)) is not None)
    assert taken(best_bulks(plan, trace, options)).iteration_seconds == pytest.approx(best, rel=1e-9)


def _compositions(total):
    """Every way of writing a number as a sum of others, in order."""
    for cuts in product([False, True], repeat=total - 1):
        ends = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), total]
        yield tuple(stop - start for start, stop in pairwise(ends))


@given(traces(8), staged_ways(1))
def test_push_and_pull_count_one_after_the_other(trace, options):
    assert sum(len(bucket.tensors) for bucket in plan_batched(trace, options)) == len(trace.tensors)


def test_neighbours_that_chose_alike_share_a_startup_and_others_do_not():
    trace = make_trace([1, 0, 0, 0, 0], [1, 1, 1000, 1000, 1])
    dense, packed = Way("ring", (LinearCost(1.0, 1.0),)), Way("ring", (LinearCost(50.0, 0.01),), codec="onebit")
    buckets = plan_batched(trace, [dense, packed])
    assert [(bucket.codec, len(bucket.tensors)) for bucket in buckets] == [(None, 2), ("onebit", 2), (None, 1)]
    with pytest.raises(PlanError, match="no way to send a bucket was given"):
        plan_batched(trace, [])
