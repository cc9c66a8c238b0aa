import sys
from functools import partial

from penstock.planners import PLANNERS
from penstock.planners.batched import plan_batched
from penstock.strategies import coded_only_names, names, sparse_names
from planning_time import claims, random_trace, routes, slowest


def test_every_strategy_is_planned_by_dense_coded_and_sparse_ones_included():
    planned = {name.partition("+")[0] for name in routes()} - {"all of them"}
    assert planned == ({*names("all_reduce"), *coded_only_names(), *sparse_names()} - {"native"})


def test_the_slowest_route_of_each_planner_is_kept_and_all_are_claimed():
    pairs = [
        {"planner": "exact by ring", "seconds": 0.1},
        {"planner": "exact by parameter_server", "seconds": 1.2},
        {"planner": "joint by ring", "seconds": 0.3},
    ]
    assert [row["planner"] for row in slowest(pairs)] == ["exact by parameter_server", "joint by ring"]
    assert [claim.holds for claim in claims(pairs)] == [True, False, True]


def lines_run(job):
    """Return how many lines of the package a job runs: what no clock and no other job disturbs."""
    count = 0

    def trace(frame, event, _argument):
        nonlocal count
        if "penstock" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        job()
    finally:
        sys.settrace(before)
    return count


def test_four_times_as_many_tensors_take_about_four_times_as_many_lines_by_every_planner_and_route():
    """Nested loops over tensors would take sixteen times as many.

    Two stages by themselves are left out: `tests/planners/test_staged.py` counts the pairs that they look at.
    """
    planners = {name: planner.buckets for name, planner in PLANNERS.items()} | {"batched": plan_batched}
    few, many = random_trace(100), random_trace(400)
    counted = 0
    for route, ways in routes().items():
        if all(len(way.stages) > 1 for way in ways):
            continue
        for name, plan in planners.items():
            jobs = [partial(plan, trace, ways) for trace in (few, many)]
            for job in jobs:
                job()  # what is kept from then on is not counted
            once, again = (lines_run(job) for job in jobs)
            assert again <= 6 * once, (name, route)
            counted += 1
    assert counted > 20 * len(planners)
