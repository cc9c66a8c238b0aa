from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cost.ways import Way, comparable
from penstock.network import LinearCost
from penstock.planners import PLANNERS
from penstock.planners.exact import plan_joint, undominated
from penstock.simulator.iteration import simulate_iteration
from planners.instances import codec_ways, make_trace, staged_ways, traces, ways
from planners.oracle import brute_force_seconds


def seconds(trace, options):
    return simulate_iteration(trace, plan_joint(trace, options), options).iteration_seconds


@given(traces(6), codec_ways())
@settings(max_examples=500)
def test_equals_brute_force_over_boundaries_strategies_codecs_and_partitions(trace, options):
    assert seconds(trace, options) == brute_force_seconds(trace, options)


@given(traces(30), codec_ways(8))
@settings(max_examples=300)
def test_is_never_worse_than_any_single_choice_under_any_planner(trace, options):
    best = seconds(trace, options)
    for planner in PLANNERS.values():
        for way in options:
            buckets = planner.buckets(trace, [way])
            alone = simulate_iteration(trace, buckets, [way], overlap=planner.overlap).iteration_seconds
            assert best <= alone
    buckets = PLANNERS["selective"].buckets(trace, options)
    assert best <= simulate_iteration(trace, buckets, options).iteration_seconds


@given(traces(8), ways(most=2), staged_ways(most=1))
@settings(max_examples=200)
def test_push_and_pull_among_other_ways_are_taken_one_after_the_other(trace, plain, staged):
    options = [*plain, Way("servers", staged[0].stages, ("push", "pull"))]
    alone = comparable(options)
    buckets = plan_joint(trace, options)
    assert simulate_iteration(trace, buckets, alone).iteration_seconds == brute_force_seconds(trace, alone)


@given(codec_ways(8), st.integers(0, 50), st.integers(0, 9))
def test_leaving_out_dominated_ways_loses_nothing(options, nbytes, tensors):
    kept = undominated(options)
    assert min(way.seconds(nbytes, tensors) for way in kept) == min(way.seconds(nbytes, tensors) for way in options)


def test_of_equal_ways_the_first_is_kept():
    line = LinearCost(1.0, 1.0)
    assert [way.strategy for way in undominated([Way("a", (line,)), Way("b", (line,))])] == ["a"]


def test_a_bucket_says_which_way_it_goes():
    trace = make_trace([1, 100], [1, 1000])
    dense, packed = Way("ring", (LinearCost(1.0, 1.0),)), Way("ring", (LinearCost(50.0, 0.01),), codec="onebit")
    assert [str(bucket.route) for bucket in plan_joint(trace, [dense, packed])] == ["ring", "ring+onebit"]


def test_a_price_per_tensor_keeps_many_small_tensors_dense():
    trace = make_trace([0] * 40, [1] * 40)
    dense = Way("ring", (LinearCost(1.0, 0.5),))
    packed = Way("ring", (LinearCost(1.0, 0.25),), codec="onebit", seconds_per_tensor=2.0)
    assert {bucket.codec for bucket in plan_joint(trace, [dense, packed])} == {None}
