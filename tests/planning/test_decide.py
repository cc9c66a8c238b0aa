"""What a plan is made from: which routes, and their costs with one worker, who sends nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
from penstock.cost.ways import way_for
from penstock.errors import PlanError
from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.planners import PLANNERS
from penstock.planning.decide import MIXING, decide, decide_in_lanes, decide_whether, learnt
from penstock.simulator.iteration import predict
from penstock.trace import Tensor, Trace
from planners.instances import lines as whole_lines
from planners.instances import traces
from planners.oracle import brute_force_seconds

TRACE = Trace("toy", "a GPU", 1, "float32", 1e-3, tuple(Tensor(name, 1 << 20, 1e-3) for name in "dcba"))
ONEBIT = Route("ring", "onebit")


def test_one_worker_needs_no_measured_line_of_the_engine():
    plan = decide(TRACE, Network(1, 0.0, 0.0, 1e-10), "exact", [Route("native")]).plan
    assert plan.iteration_seconds == pytest.approx(5e-3)
    with pytest.raises(PlanError, match="no measured line for 'native'"):
        decide(TRACE, Network(2, 1e-4, 1e-9, 1e-10), "exact", [Route("native")])


ROUTES = (Route("native"), Route("ring"), ONEBIT, Route("ring", "onebit", 8), Route("parameter_server", "onebit"))
lines = st.builds(LinearCost, st.integers(0, 12).map(lambda a: a * 1e-3), st.integers(0, 8).map(lambda b: b * 1e-9))
measured = st.lists(lines, min_size=len(ROUTES), max_size=len(ROUTES)).map(
    lambda found: Network(4, 1e-4, 1e-9, 1e-10, dict(zip(map(str, ROUTES), found, strict=True)))
)


@given(traces(4), measured)
@settings(max_examples=25)
def test_mixing_planners_are_never_behind_any_single_choice_and_joint_is_the_optimum(trace, network):
    """Compress or not, and K, up to the 5% for which no further message is sent, and the 1% that make a tie."""
    ways = [way_for(network, route) for route in ROUTES]
    every = [predict(trace, PLANNERS[name], [way], 4) for way in ways for name in ("exact", "single", "wfbp")]
    best_single = min(plan.iteration_seconds for plan in every)
    joint, selective = (decide(trace, network, planner, ROUTES).plan for planner in ("joint", "selective"))
    assert joint.iteration_seconds <= 1.01 / 0.95 * brute_force_seconds(trace, ways)
    assert selective.iteration_seconds <= 1.01 / 0.95 * best_single
    plain = decide(trace, network, "exact", ROUTES).plan
    for plan in (joint, selective):
        assert plan.iteration_seconds <= plain.iteration_seconds
        assert len(plan.buckets) <= len(plain.buckets) or plan.iteration_seconds < 0.95 * plain.iteration_seconds
    assert {joint.planner, selective.planner} == {"joint", "selective"}


@given(traces(6), whole_lines, st.sampled_from([1.0, 1.5, 3.0]))
@settings(max_examples=50)
def test_no_planner_is_said_to_beat_the_optimum_whatever_slows_messages_down(trace, line, slowdown):
    network = Network(4, 1e-4, 1e-9, 1e-10, {"native": line})
    taken = dict(decide(trace, network, "exact", [Route("native")], slowdown).alternatives)
    assert min(taken.values()) >= taken["exact"] * (1 - 1e-9)
    assert taken["exact"] == pytest.approx(brute_force_seconds(trace, [way_for(network, Route("native"))]))


def network_of(**milliseconds: float) -> Network:
    """Return two workers' network with lines that have no bytes in them; underscores stand for what names may not."""
    names = {"native": "native", "onebit": "ring+onebit", "finer": "ring+onebit/8", "bf16": "ring+bf16"}
    return Network(2, 1e-4, 1e-9, 1e-10, {names[name]: LinearCost(1e-3 * ms, 0.0) for name, ms in milliseconds.items()})


@pytest.mark.parametrize("planner", MIXING)
@pytest.mark.parametrize(
    ("milliseconds", "wanted"),
    [
        ({"native": 1, "onebit": 5, "finer": 5}, Route("native")),
        ({"native": 9, "onebit": 5, "finer": 6}, ONEBIT),
        ({"native": 9, "onebit": 5, "finer": 3}, Route("ring", "onebit", 8)),
    ],
)
def test_a_mixing_planner_with_a_codec_may_leave_buckets_dense_or_cut_them_finer(planner, milliseconds, wanted):
    routes = (Route("native"), ONEBIT, Route("ring", "onebit", 8))
    decision = decide(TRACE, network_of(**milliseconds), planner, routes)
    assert {bucket.route for bucket in decision.plan.buckets} == {wanted}
    plain = decide(TRACE, network_of(**milliseconds), "exact", routes).plan
    assert {bucket.route for bucket in plain.buckets} == {ONEBIT}  # compresses everything, as it was told to


@pytest.mark.parametrize("planner", ["exact", "joint", "selective"])
def test_auto_says_in_one_line_what_dense_and_every_candidate_would_take(planner):
    routes = (Route("native"), Route("ring", "bf16"), ONEBIT)
    network = network_of(native=40, bf16=20, onebit=4)
    decision = decide_whether(TRACE, network, planner, routes)
    assert {bucket.codec for bucket in decision.plan.buckets} == {"onebit"}
    (said,) = decision.reason.splitlines()
    assert said.startswith("compression is on: onebit for ")
    assert said.endswith("predicted iteration: dense 45 ms, bf16 25 ms, onebit 9 ms")


SERVED = Route("parameter_server", "blocks(bits=4)")


def queued_network(a_seconds=2e-3, b_seconds_per_byte=1e-9):
    return Network(4, 1e-4, 1e-9, 1e-10, {str(SERVED): LinearCost(a_seconds, b_seconds_per_byte, 0.0, rounds=2.0)})


def test_what_iterations_took_says_how_much_longer_messages_take_beside_computation():
    """The slowdown is the one that gives the measured time, of which simulating with it is the oracle."""
    tensors = tuple(Tensor(name, 1 << 20, 1e-2) for name in "hgfedcba")
    trace, network = Trace("toy", "a GPU", 1, "float32", 1e-3, tensors), queued_network(1e-3, 2.2e-9)
    decision = decide(trace, network, "exact", [SERVED])
    for slowdown in (1.4, 2.5):
        taken = decide(trace, network, "exact", [SERVED], slowdown).plan.iteration_seconds
        found = learnt(decision, taken)
        assert found.slowdown == pytest.approx(slowdown, abs=0.02)
        assert found.plan.iteration_seconds == pytest.approx(taken, rel=0.01)
        assert found.plan.buckets == decision.plan.buckets


def test_a_prediction_that_was_about_right_is_kept_and_one_that_nothing_explains_is_slowed_as_far_as_that_goes():
    decision = decide(TRACE, queued_network(), "exact", [SERVED])
    assert learnt(decision, 1.04 * decision.plan.iteration_seconds).plan == decision.plan
    assert learnt(decision, 0.5 * decision.plan.iteration_seconds).slowdown == 1.0
    assert learnt(decision, 9.0).slowdown == 4.0


def test_no_plan_that_races_has_tensors_together_whose_payloads_take_much_memory():
    """1 MB of payloads are 7.9 MB of gradients: of tensors of 4 MB, three that are ready early go by themselves.

    As one message they would take as long, before the last is ready: by hand, 0.13 s of its 0.2 s.
    """
    times = zip("dcba", (1e-3, 1e-4, 1e-4, 0.2), strict=True)
    tensors = tuple(Tensor(name, 1 << 20, seconds) for name, seconds in times)
    trace = Trace("toy", "a GPU", 1, "float32", 1e-3, tensors)
    decision = decide(trace, queued_network(2e-4, 1e-8), "exact", [SERVED])
    plans = decision.plan, *decide_in_lanes(decision, [SERVED], 1, bulk=True).rivals
    assert [len(bucket.tensors) for bucket in decision.plan.buckets] == [1, 1, 1, 1]
    assert all(bucket.nbytes <= 7.9e6 for plan in plans for bucket in plan.buckets)


def test_buckets_may_be_a_tenth_larger_than_the_largest_tensor_whose_payloads_take_memory_anyway():
    """60 MB that are ready early, then a tensor of 160 MB with one of 4 MB just before it, in four bits."""
    sizes, times = (15_000_000, 1_000_000, 40_000_000), (1e-3, 0.2, 1e-4)
    tensors = tuple(Tensor(name, *each) for name, *each in zip("cba", sizes, times, strict=True))
    trace = Trace("toy", "a GPU", 1, "float32", 1e-3, tensors)
    plan = decide(trace, queued_network(2e-3, 1e-9), "exact", [SERVED]).plan
    assert [bucket.tensors for bucket in plan.buckets] == [("c",), ("b", "a")]
