from dataclasses import replace

import numpy as np
import pytest

from penstock.cluster.iteration_replay import Gradients, Replay, replay_plans
from penstock.cost.ways import Way, way_for
from penstock.curves import CodecCurves, Curve
from penstock.errors import PlanError
from penstock.network import LinearCost, Network
from penstock.planners import PLANNERS
from penstock.runtime.communicator import Communicator
from penstock.simulator.iteration import predict
from penstock.trace import Tensor, Trace
from runtime.threads import run_ranks

TRACE = Trace("toy", "paper", 1, "float32", 0.02, tuple(Tensor(f"t{i}", 1000, 0.002) for i in range(40)))
NETWORK = Network(2, 1e-5, 1e-9, 1e-10, {"native": LinearCost(1e-4, 1e-9)})


def plan(name, strategy="ring"):
    return predict(TRACE, PLANNERS[name], [way_for(NETWORK, strategy)], workers=2)


@pytest.mark.parametrize("planner", ["naive", "wfbp", "single", "exact"])
def test_buckets_leave_when_their_last_gradient_is_ready_and_not_before(planner):
    wanted = plan(planner)

    def work(transport):
        replay = Replay(TRACE, wanted, Communicator(transport, timeout_seconds=120))
        replay.run()  # opens what has to be opened
        replayed = replay.run()
        replay.close()
        return replayed

    for replayed in run_ranks(2, work):
        sent = replayed.timeline.lane("network")
        assert len(sent) == len(wanted.buckets)
        ready = dict(zip((t.name for t in TRACE.tensors), TRACE.ready_seconds, strict=True))
        for bucket, span in zip(wanted.buckets, sent, strict=True):
            earliest = ready[bucket.tensors[-1]] if wanted.overlap else TRACE.compute_seconds
            assert span.start_seconds >= earliest
        assert replayed.iteration_seconds >= TRACE.compute_seconds


class Clock:
    """A clock that only sleeping moves, always a little further than was asked."""

    late_seconds = 0.001

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds + self.late_seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("penstock.cluster.iteration_replay.time", clock)
    return clock


def test_the_clock_starts_when_all_ranks_have_made_their_gradients(clock):
    ways = [Way("ring", (LinearCost(1e-4, 1e-9),), codec="onebit")]
    wanted = predict(TRACE, PLANNERS["single"], ways, workers=1)

    def work(transport):
        replay = Replay(TRACE, wanted, Communicator(transport))
        made = []

        def start_together():
            made.append(replay.gradients.values.any())
            clock.sleep(0.2)

        replayed = replay.run(start_together)
        replay.close()
        return made, replayed

    ((made, replayed),) = run_ranks(1, work)
    assert made == [True]
    assert replayed.timeline.spans[0].end_seconds == pytest.approx(TRACE.forward_seconds + clock.late_seconds)


def test_computation_takes_what_the_trace_says_however_late_each_tensor_is(clock):
    def work(transport):
        replay = Replay(TRACE, plan("single"), Communicator(transport))
        late = replay.run().lateness_seconds
        replay.close()
        return late

    assert run_ranks(1, work) == [pytest.approx(clock.late_seconds)]  # once, not for each of forty tensors


def test_rows_set_measured_beside_simulated():
    plans = {name: plan(name, "native") for name in ("wfbp", "single")}

    def work(transport):
        communicator = Communicator(transport, timeout_seconds=120)
        return replay_plans(TRACE, plans, NETWORK, communicator, iterations=2)

    for rows, timelines in run_ranks(2, work):
        assert [row.planner for row in rows] == ["wfbp", "single"]
        assert [row.messages for row in rows] == [40, 1]
        for row in rows:
            assert row.measured_seconds >= TRACE.compute_seconds
            assert row.error == pytest.approx(row.simulated_seconds / row.measured_seconds - 1)
        simulated, measured = timelines["single"]
        assert simulated.iteration_seconds == rows[1].simulated_seconds
        assert len(measured.lane("network")) == 1


def test_plans_take_turns_and_each_has_every_place(monkeypatch):
    order, run = [], Replay.run

    def noted(self, *arguments, **options):
        if self._communicator.transport.rank == 0:
            order.append(self._plan.planner)
        return run(self, *arguments, **options)

    monkeypatch.setattr(Replay, "run", noted)
    plans = {name: plan(name, "native") for name in ("wfbp", "single", "exact")}

    def work(transport):
        return replay_plans(TRACE, plans, NETWORK, Communicator(transport, timeout_seconds=120), iterations=2)

    run_ranks(2, work)
    assert order == ["wfbp", "single", "exact", "wfbp", "single", "exact", "single", "exact", "wfbp", *plans]


def test_compressed_buckets_are_compressed_for_real_and_all_ranks_end_with_the_same_bits():
    """Every tensor of a bucket decodes to two values, the means of its own signs, whatever bucket it is in."""
    curves = CodecCurves(1 / 32, Curve(1e-10, 1e-6), Curve(1e-10, 1e-6))
    network = replace(NETWORK, codecs={"onebit": curves})
    dense, packed = way_for(network, "ring"), way_for(network, "parameter_server+onebit/2")
    plans = {
        "wfbp": predict(TRACE, PLANNERS["wfbp"], [way_for(network, "ring+onebit")], 2),
        "joint": predict(TRACE, PLANNERS["joint"], [packed], 2),
        "dense": predict(TRACE, PLANNERS["single"], [dense], 2),
    }

    def work(transport):
        communicator, gradients = Communicator(transport, timeout_seconds=120), Gradients(TRACE)
        values = []
        for each in plans.values():
            replay = Replay(TRACE, each, communicator, gradients)
            replay.run()
            replay.close()
            values.append(gradients.values.copy())
        return values, replay_plans(TRACE, plans, network, communicator, iterations=1)[0]

    (first, rows), (second, _) = run_ranks(2, work)
    for mine, theirs in zip(first, second, strict=True):
        assert np.array_equal(mine, theirs)
    assert all(len(np.unique(first[0][i : i + 1000])) == 2 for i in range(0, 40_000, 1000))
    assert [row.messages for row in rows] == [40, len(plans["joint"].buckets), 1]
    assert all(row.measured_seconds >= TRACE.compute_seconds for row in rows)


def test_all_ranks_agree_on_what_was_measured():
    def work(transport):
        communicator = Communicator(transport, timeout_seconds=120)
        return replay_plans(TRACE, {"exact": plan("exact", "native")}, NETWORK, communicator, iterations=2)[0]

    rows = run_ranks(3, work)
    assert len({row[0].measured_seconds for row in rows}) == 1


def test_a_plan_for_another_trace_is_refused():
    other = Trace("other", "paper", 1, "float32", 0.0, (Tensor("x", 1, 0.0),))
    with pytest.raises(PlanError, match="plan holds tensor 't0', which trace 'other' does not have"):
        run_ranks(1, lambda transport: Replay(other, plan("wfbp"), Communicator(transport)))


def test_sixteen_bit_traces_send_half_the_bytes():
    half = TRACE.with_dtype("bfloat16")
    wanted = predict(half, PLANNERS["single"], [way_for(NETWORK, "ring")], workers=1)

    def work(transport):
        replay = Replay(half, wanted, Communicator(transport))
        replay.run()
        replay.close()
        return replay

    (replay,) = run_ranks(1, work)
    assert replay.gradients.values.nbytes == sum(half.nbytes)
    assert np.isfinite(replay.gradients.values).all()


def test_a_network_measured_again_between_iterations_is_what_plans_are_simulated_on():
    """Lines of 3, 1 and 2 s: the median counts, and not that of the network that the plan was made with."""

    def work(transport):
        communicator, seconds = Communicator(transport, timeout_seconds=60), iter((3.0, 1.0, 2.0))

        def measure_again():
            return replace(NETWORK, all_reduce={"native": LinearCost(next(seconds), 0.0)})

        plans = {"single": plan("single", "native")}
        rows, _ = replay_plans(TRACE, plans, NETWORK, communicator, 3, measure_again=measure_again)
        return rows[0].simulated_seconds

    assert run_ranks(2, work) == [pytest.approx(TRACE.compute_seconds + 2.0)] * 2
