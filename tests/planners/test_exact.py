from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cost.clusters import CLUSTERS
from penstock.cost.ways import Way, way_for
from penstock.errors import PlanError
from penstock.network import LinearCost
from penstock.planners import PLANNERS
from penstock.planners.exact import plan_exact
from penstock.simulator.iteration import simulate_iteration
from penstock.traces import load_shipped
from planners.instances import make_trace, staged_ways, traces, ways
from planners.oracle import brute_force_seconds, schedule_seconds


def seconds(trace, options):
    return simulate_iteration(trace, plan_exact(trace, options), options).iteration_seconds


@given(traces(), ways())
@settings(max_examples=2000)
def test_equals_brute_force_over_all_partitions(trace, options):
    assert seconds(trace, options) == brute_force_seconds(trace, options)


@given(traces(8), ways())
@settings(max_examples=300)
def test_no_optimal_schedule_has_fewer_messages(trace, options):
    best = brute_force_seconds(trace, options)
    count = len(trace.tensors)
    fewest = min(
        len(ends)
        for marks in product((False, True), repeat=count - 1)
        for ends in [[i for i, mark in enumerate(marks) if mark] + [count - 1]]
        if schedule_seconds(trace, ends, [options[0].stages] * len(ends)) == best
    )
    assert len(plan_exact(trace, options)) == fewest


@given(traces(6), ways(most=3))
@settings(max_examples=500)
def test_equals_brute_force_over_all_partitions_and_ways(trace, options):
    assert seconds(trace, options) == brute_force_seconds(trace, options)


@given(traces(8), staged_ways())
@settings(max_examples=300)
def test_push_and_pull_equal_brute_force(trace, options):
    assert seconds(trace, options) == brute_force_seconds(trace, options)


@given(traces(5), staged_ways(most=2))
@settings(max_examples=200)
def test_push_and_pull_with_several_ways_equal_brute_force(trace, options):
    assert seconds(trace, options) == brute_force_seconds(trace, options)


@given(traces(40), st.one_of(ways(), staged_ways()))
@settings(max_examples=300)
def test_is_never_worse_than_any_other_planner(trace, options):
    best = seconds(trace, options)
    for planner in PLANNERS.values():
        buckets = planner.buckets(trace, options)
        assert best <= simulate_iteration(trace, buckets, options, overlap=planner.overlap).iteration_seconds


@given(traces(40), ways(most=3))
def test_a_plan_is_a_partition_in_order(trace, options):
    for planner in PLANNERS.values():
        buckets = planner.buckets(trace, options)
        assert [name for bucket in buckets for name in bucket.tensors] == [t.name for t in trace.tensors]
        assert sum(bucket.nbytes for bucket in buckets) == sum(trace.nbytes)
        assert all(bucket.tensors for bucket in buckets)


def test_greedy_loses_on_a_run_of_short_gaps():
    """Erratum 1: 100 equal layers whose gap and transfer time are both 0.9a take 181a greedily, 104.4a at best."""
    a = 1.0
    trace = make_trace([0.9] * 100, [1] * 100)
    options = [Way("ring", (LinearCost(a, 0.9 / 4),))]
    greedy = PLANNERS["greedy"].buckets(trace, options)
    assert len(greedy) == 1
    assert simulate_iteration(trace, greedy, options).iteration_seconds == pytest.approx(181.0)
    assert seconds(trace, options) == pytest.approx(104.4)
    assert len(plan_exact(trace, options)) == 13


def test_free_startups_leave_nothing_to_merge_for():
    trace = make_trace([1, 1, 1], [4, 4, 4])
    options = [Way("ring", (LinearCost(0.0, 1.0),))]
    assert seconds(trace, options) == 1 + 3 * 16


def test_each_bucket_gets_the_way_that_suits_its_size():
    trace = make_trace([1, 100], [1, 1000])
    options = [Way("quick_start", (LinearCost(1.0, 1.0),)), Way("wide", (LinearCost(50.0, 0.01),))]
    assert [bucket.strategy for bucket in plan_exact(trace, options)] == ["quick_start", "wide"]


def test_the_worked_example_of_the_docstring():
    trace = make_trace([1, 1, 1], [1, 1, 1])
    options = [Way("ring", (LinearCost(2.0, 0.1 / 4),))]
    assert seconds(trace, options) == pytest.approx(5.3)


def test_no_way_is_no_plan():
    trace = make_trace([1], [1])
    with pytest.raises(PlanError, match="no way to send a bucket was given"):
        plan_exact(trace, [])


@given(traces(6), ways(2), staged_ways(2))
@settings(max_examples=60, deadline=None)
def test_servers_beside_other_ways_push_and_then_pull(trace, one_stage, two_stages):
    """As they do at run time, where a bucket by another way stands between."""
    servers = [replace(way, strategy=f"servers{number}") for number, way in enumerate(two_stages)]
    serial = [Way(way.strategy, (way.whole,)) for way in (*one_stage, *servers)]
    assert seconds(trace, [*one_stage, *servers]) == pytest.approx(brute_force_seconds(trace, serial))


def test_dense_and_compressed_servers_are_planned_together():
    network, trace = CLUSTERS["hipress-100gbps"], load_shipped("resnet50")
    dense, packed = (way_for(network, route) for route in ("parameter_server", "parameter_server+onebit"))
    assert (len(dense.stages), len(packed.stages)) == (2, 1)
    mixed = seconds(trace, [dense, packed])
    assert mixed <= min(seconds(trace, [dense.one_stage()]), seconds(trace, [packed]))
