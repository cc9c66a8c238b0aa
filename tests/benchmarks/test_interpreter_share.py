import numpy as np

from interpreter_share import ShareJob, _job, claims, watched
from penstock.exchange.compression import Compression
from penstock.exchange.exchange import Exchange
from penstock.plan import Route
from penstock.runtime.communicator import Communicator
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
        found = watched(exchange, iterate, 2)
        exchange.close()
        return found

    for walk in run_ranks(2, work):
        assert walk.kernel_seconds > 0
        assert walk.walk_seconds >= walk.handing_seconds > 0
        assert walk.calls["SEND"] == walk.calls["RECV"] == 2 * 3 * 2  # iterations, buckets, messages of a rank
        assert walk.calls["WAIT"] == walk.calls["SEND"] + walk.calls["RECV"]
        assert walk.calls["COMPUTE"] == 2 * 3 * 5  # two encodes, one sum, two decodes


def test_only_planned_iterations_are_asked_to_take_next_to_nothing():
    rows = [{"model": "a", "planner": planner, "share": 0.04} for planner in ("exact", "wfbp")]
    (claim,) = claims(rows)
    assert (claim.value, claim.holds) == (0.04, False)
    assert _job("resnet50:1:wfbp", "onebit", 5) == ShareJob("resnet50", 1, "onebit", "wfbp", 5)
    assert _job("vgg16_cifar", "onebit", 5) == ShareJob("vgg16_cifar", 0, "onebit", "exact", 5)
