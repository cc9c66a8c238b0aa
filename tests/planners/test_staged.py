from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cost.clusters import CLUSTERS
from penstock.cost.ways import Way, way_for
from penstock.errors import NetworkError
from penstock.network import LinearCost
from penstock.planners import PLANNERS, staged
from penstock.planners.batched import plan_batched
from penstock.planners.exact import plan_exact
from penstock.simulator.fitted import fitted_cost
from penstock.simulator.iteration import simulate_iteration
from penstock.strategies import STRATEGIES
from penstock.trace import Tensor, Trace
from penstock.traces import load_shipped
from planners.instances import make_trace, staged_ways, traces
from planners.oracle import brute_force_seconds


def seconds(trace, options):
    return simulate_iteration(trace, plan_exact(trace, options), options).iteration_seconds


@given(traces(7), staged_ways(most=2), st.integers(1, 3))
@settings(max_examples=200)
def test_a_price_for_each_tensor_of_the_first_stage_is_planned_exactly(trace, options, each):
    priced = [Way(way.strategy, way.stages, way.lanes, seconds_per_tensor=float(each)) for way in options]
    assert seconds(trace, priced) == brute_force_seconds(trace, priced)


@given(traces(10), staged_ways(), st.integers(1, 6))
@settings(max_examples=300)
def test_glued_tensors_end_no_later_than_the_bound_behind_the_optimum(trace, options, grains):
    prefix = [sum(trace.nbytes[:count]) for count in range(len(trace.tensors) + 1)]
    ends = staged.grain_ends(trace.ready_seconds, prefix, grains)
    cuts = staged._Search(trace.ready_seconds, prefix, ends, options).run(None)
    chosen = [Way("glued", options[0].stages, options[0].lanes)] * len(cuts)
    start, free, ready = 0, [0.0, 0.0], trace.ready_seconds
    for (last, _), way in zip(cuts, chosen, strict=True):
        nbytes, now = sum(trace.nbytes[start : last + 1]), ready[last]
        for index, stage in enumerate(way.stages):
            now = free[index] = max(now, free[index]) + stage.seconds(nbytes)
        start = last + 1
    push = options[0].stages[0].b_seconds_per_byte
    bound = (ready[-1] - ready[0] + push * prefix[-1]) / grains
    assert max(free[1], ready[-1]) <= brute_force_seconds(trace, options) + bound + 1e-9


def test_grains_are_few_and_none_but_single_tensors_are_large():
    trace = make_trace([1] * 1000, [1, 2, 3, 1000] * 250)
    prefix = [sum(trace.nbytes[:count]) for count in range(1001)]
    ends = staged.grain_ends(trace.ready_seconds, prefix, 20)
    assert ends[-1] == 1000
    assert len(ends) <= 4 * 20 + 2
    for start, end in zip([0, *ends], ends, strict=False):
        wide = trace.ready_seconds[end - 1] - trace.ready_seconds[start] > 999 / 20
        heavy = prefix[end] - prefix[start] > prefix[-1] / 20
        assert end - start == 1 or not (wide or heavy)


def test_too_many_pairs_are_given_up_and_glued(monkeypatch):
    trace = make_trace([1] * 40, [5] * 40)
    options = [Way("servers", (LinearCost(2.0, 0.1), LinearCost(3.0, 0.2)), ("push", "pull"))]
    best = seconds(trace, options)
    monkeypatch.setattr(staged, "MOST_STATES", 10)
    assert (
        best <= seconds(trace, options) <= best + (trace.backward_seconds + 0.1 * sum(trace.nbytes)) / staged.GRAINS[-1]
    )


def test_parameter_servers_plan_a_resnet_50_looking_at_few_pairs():
    """161 tensors took minutes; what is counted here is pairs, which a clock cannot disturb."""
    trace, way = load_shipped("resnet50"), way_for(CLUSTERS["mg-wfbp-simulation"], "parameter_server", 16)
    prefix = [sum(trace.nbytes[:count]) for count in range(162)]
    assert staged._Search(trace.ready_seconds, prefix, range(1, 162), [way]).run(staged.MOST_STATES) is not None


def large():
    numels = [64, 512, 2048, 65536, 1 << 20]
    tensors = tuple(Tensor(f"t{i}", numels[i * i % 5], (i % 7) * 1e-5) for i in range(10_000))
    return Trace("large", "none", 1, "float32", 0.1, tensors)


def test_the_coarsest_grains_of_ten_thousand_tensors_have_few_pairs():
    """The one search without a limit: what is counted is pairs again."""
    trace, way = large(), way_for(CLUSTERS["mg-wfbp-simulation"], "parameter_server", 16)
    prefix = list(accumulate(trace.nbytes, initial=0))
    ends = staged.grain_ends(trace.ready_seconds, prefix, staged.GRAINS[-1])
    assert staged._Search(trace.ready_seconds, prefix, ends, [way]).run(staged.MOST_STATES) is not None


def test_every_planner_takes_ten_thousand_tensors_by_every_strategy():
    """Quadratic planners would take minutes here; `benchmarks/planning_time.py` has the seconds of each."""
    trace, network = large(), CLUSTERS["hipress-100gbps"]
    planners = [planner.buckets for planner in PLANNERS.values()] + [plan_batched]
    planned = 0
    for name in STRATEGIES:
        try:
            way = way_for(network, name, 16, fitted_cost)
        except NetworkError:
            continue  # it carries nothing dense
        for plan in planners:
            assert sum(len(bucket.tensors) for bucket in plan(trace, [way])) == 10_000
            planned += 1
    assert planned >= 9 * len(planners)
