from time import thread_time

import numpy as np
import pytest

from interpreter_share import KernelClock, ShareJob, Walk, _figures, _job, claims, dispatch_seconds, watched
from penstock.compll.backends.numba.backend import NumbaKernels
from penstock.exchange.compression import Compression
from penstock.exchange.exchange import Exchange
from penstock.plan import Route
from penstock.program import Instruction, Op
from penstock.runtime.communicator import Communicator
from penstock.runtime.hosts import processors
from penstock.runtime.schedule import Action, Do
from runtime.threads import run_ranks


def test_kernels_are_told_from_the_walk_and_actions_are_counted():
    """A ring on two ranks: nine instructions for each of three buckets, and as many waits as messages."""

    def work(transport):
        communicator, ring = Communicator(transport, timeout_seconds=60), Route("ring", "onebit")
        exchange = Exchange(communicator, Compression("onebit"), route=ring)
        buckets = [exchange.bucket([f"t{i}"], [1 << 18]) for i in range(3)]
        values = [np.ones(1 << 18, np.float32) for _ in buckets]

        def iterate():
            exchange.begin()
            for handle in [exchange.start(*each) for each in zip(buckets, values, strict=True)]:
                exchange.wait(handle)

        iterate()

        def burning():
            iterate()
            exchange._threads[1].submit(burn, 0.02).result()

        found, slow = watched(exchange, iterate, 2), watched(exchange, burning, 2)
        exchange.close()
        return found, slow

    for walk, slow in run_ranks(2, work):
        assert walk.kernel_seconds > 0
        assert walk.walk_seconds >= walk.handing_seconds > 0
        assert walk.lane_seconds >= walk.kernel_seconds + walk.engine_seconds
        assert slow.walk_seconds >= 0.02  # Python on a lane's thread
        assert walk.calls["SEND"] == walk.calls["RECV"] == 3 * 2  # buckets, messages of a rank
        assert walk.calls["WAIT"] == walk.calls["SEND"] + walk.calls["RECV"]
        assert walk.calls["COMPUTE"] == 3 * 5  # two encodes, one sum, two decodes


def burn(seconds):
    """Take so much processor time of this thread."""
    end = thread_time() + seconds
    while thread_time() < end:
        pass


def test_the_walk_is_all_but_kernels_and_the_engine_and_what_hands_buckets_over():
    walk = Walk(10.0, kernel_seconds=6.0, engine_seconds=3.0, handing_seconds=0.5, calls={})
    assert walk.walk_seconds == 1.5
    assert _figures(walk, 100.0, 0.5, 4)["share"] == pytest.approx(2.0 * 4 / processors() / 100.0)


@pytest.mark.parametrize("codec", ["onebit", "terngrad(bitwidth=2)", "blocks(bits=4)"])
def test_calling_kernels_that_do_nothing_takes_less_than_the_kernels_and_leaves_them_as_they_were(codec):
    """Of two ranks one is measured; the other makes as many iterations."""

    def work(transport):
        exchange = Exchange(Communicator(transport, timeout_seconds=60), Compression(codec), route=Route("ring", codec))
        bucket, values = exchange.bucket(["t"], [1 << 20]), np.ones(1 << 20, np.float32)

        def iterate():
            exchange.begin()
            exchange.wait(exchange.start(bucket, values))

        iterate()
        if transport.rank == 0:
            found = watched(exchange, iterate, 3).kernel_seconds, dispatch_seconds(exchange, iterate, 3)
        else:
            found = [iterate() for _ in range(3 + 2 + 3)]
        exchange.close()
        return found

    bound = NumbaKernels.bound
    (whole, idle), _ = run_ranks(2, work)
    assert 0 < idle < whole
    assert NumbaKernels.bound is bound


def test_calls_of_the_engine_count_on_lanes_only():
    clock = KernelClock()
    call = clock.timed(burn)
    call(0.01)  # of another thread than a lane's
    for _ in clock.watch(0, [Instruction(Op.SEND, peer=1)], [Action(Do.SEND, 0)]):
        call(0.002)
    assert 0.002 <= clock.engine_seconds < 0.01


class Engine:
    def send(self):
        burn(0.003)


def test_the_engines_calls_are_timed_while_iterations_are_watched_and_left_as_they_were():
    """Of two ranks one is watched: its encoded block, and then the sum of the other, are sent by calls of 3 ms."""

    def work(transport):
        communicator = Communicator(transport, timeout_seconds=60)
        exchange = Exchange(communicator, Compression("onebit"), route=Route("ring", "onebit"), lanes=1)
        bucket, values = exchange.bucket(["t"], [1 << 12]), np.ones(1 << 12, np.float32)
        isend = transport.isend

        def sent(*arguments):
            if transport.rank == 0:
                Engine().send()
            return isend(*arguments)

        transport.isend = sent

        def iterate():
            exchange.begin()
            exchange.wait(exchange.start(bucket, values))

        walk = watched(exchange, iterate, 2, [(Engine, "send")] if transport.rank == 0 else ())
        exchange.close()
        return walk

    before = Engine.send
    found, other = run_ranks(2, work)
    assert Engine.send is before
    assert found.engine_seconds >= found.calls["SEND"] * 0.003 > 0
    assert other.engine_seconds == 0


def test_only_planned_iterations_are_asked_to_take_next_to_nothing():
    rows = [{"model": "a", "planner": planner, "share": 0.04} for planner in ("exact", "wfbp")]
    (claim,) = claims(rows)
    assert (claim.value, claim.holds) == (0.04, False)
    assert _job("resnet50:1:wfbp", "onebit", 5, 2) == ShareJob("resnet50", 1, "onebit", "wfbp", 2)
    assert _job("vgg16_cifar", "onebit", 5, 2) == ShareJob("vgg16_cifar", 0, "onebit", "exact", 5)
