"""Bulks: buckets in memory of their own travel as one message, with the bits of one bucket that holds all of them."""

from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
import pytest

from penstock.errors import NonFiniteError, PlanError
from penstock.exchange.compression import make_scheme
from penstock.exchange.exchange import Exchange
from penstock.exchange.momentum import Momentum
from penstock.exchange.parameter_state import Memory
from penstock.plan import Bucket, Plan
from penstock.runtime.communicator import Communicator
from runtime.threads import run_ranks

NUMELS = (700, 37, 1, 1200, 64, 300, 5)  # of seven parameters, a bucket for each
BULKS = (3, 1, 2, 1)
TIMEOUT = 60.0


def plan_of(strategy: str, codec: str | None, bulks: tuple[int, ...] = (), overlap: bool = True) -> Plan:
    buckets = tuple(Bucket((f"p{i}",), 4 * numel, strategy, codec) for i, numel in enumerate(NUMELS))
    return Plan("m", 2, "wfbp", buckets, overlap, bulks=bulks)


def gradients(rank: int, step: int) -> list[np.ndarray]:
    generator = np.random.default_rng([rank, step])
    return [generator.standard_normal(numel).astype(np.float32) for numel in NUMELS]


def exchange_for(transport, plan: Plan, scheme) -> Exchange:
    exchange = Exchange(Communicator(transport, timeout_seconds=TIMEOUT), memory=Memory(scheme))
    exchange.follow(plan)
    return exchange


def in_bulk(transport, plan: Plan, scheme):
    """Train three steps with an array for each bucket; return averages by parameter, residuals and messages."""
    exchange = exchange_for(transport, plan, scheme)
    buckets = [exchange.bucket([f"p{i}"], [numel]) for i, numel in enumerate(NUMELS)]
    found, values = [], [np.zeros(numel, np.float32) for numel in NUMELS]
    for step in range(3):
        exchange.begin()
        for memory, each in zip(values, gradients(transport.rank, step), strict=True):
            memory[:] = each
        handles = [exchange.start(bucket, each) for bucket, each in zip(buckets, values, strict=True)]
        exchange.finish()
        for handle in handles:
            exchange.wait(handle)
        found += [each.copy() for each in values]
    exchange.close()
    return found, exchange.state_dict()["memories"], len(exchange.used)


def side_by_side(transport, plan: Plan, scheme):
    """Do the same with buckets that hold what the plan's bulks do."""
    exchange, messages = exchange_for(transport, plan.merged, scheme), list(pairwise(accumulate(BULKS, initial=0)))
    buckets = [exchange.bucket([f"p{i}" for i in range(*each)], NUMELS[slice(*each)]) for each in messages]
    found, values = [], [np.zeros(sum(NUMELS[slice(*each)]), np.float32) for each in messages]
    for step in range(3):
        exchange.begin()
        for memory, each in zip(values, messages, strict=True):  # the same in all steps, as buckets in training
            memory[:] = np.concatenate(gradients(transport.rank, step)[slice(*each)])
        handles = [exchange.start(bucket, each) for bucket, each in zip(buckets, values, strict=True)]
        exchange.finish()
        for handle in handles:
            exchange.wait(handle)
        found += np.split(np.concatenate(values), np.cumsum(NUMELS)[:-1])
    exchange.close()
    return found, exchange.state_dict()["memories"], len(exchange.used)


@pytest.mark.parametrize(
    ("codec", "strategy", "options", "overlap"),
    [
        (None, "ring", {}, True),
        (None, "native", {}, True),
        (None, "ring", {}, False),
        ("onebit", "ring", {}, True),
        ("onebit", "ring", {"dense_below": 50}, True),
        ("terngrad(bitwidth=2)", "parameter_server", {}, True),
        ("sparse(density=0.05)", "gtopk", {"momentum": Momentum(0.9, clip=1.0, clip_by="tensor")}, True),
    ],
)
def test_a_bulk_has_the_bits_of_one_bucket_on_all_ranks(codec, strategy, options, overlap) -> None:
    scheme = make_scheme(codec and codec.replace("sparse", "gtopk"), **options)
    plan = plan_of(strategy, codec, BULKS, overlap)
    bulks, merged = (run_ranks(2, lambda at, run=run: run(at, plan, scheme)) for run in (in_bulk, side_by_side))
    for (averages, memories, messages), (expected, kept, _) in zip(bulks, merged, strict=True):
        assert messages == len(BULKS)
        for each, other, first in zip(averages, expected, bulks[0][0], strict=True):
            np.testing.assert_array_equal(each, other)
            np.testing.assert_array_equal(each, first)
        assert memories.keys() == kept.keys()
        for kind, owed in memories.items():
            assert owed.keys() == kept[kind].keys()
            for name, each in owed.items():
                np.testing.assert_array_equal(each, kept[kind][name])


def test_a_bulk_takes_the_instructions_of_one_bucket_and_not_of_all_of_them() -> None:
    def rank(transport, bulks):
        exchange = exchange_for(transport, plan_of("ring", "onebit", bulks), make_scheme("onebit"))
        buckets = [exchange.bucket([f"p{i}"], [numel]) for i, numel in enumerate(NUMELS)]
        for step in range(2):
            exchange.record(step == 1)
            exchange.begin()
            for each in [exchange.start(*each) for each in zip(buckets, gradients(transport.rank, 0), strict=True)]:
                exchange.wait(each)
        spans = exchange.communicator.recorder.timeline(0.0).spans
        exchange.close()
        return Counter(span.name.split(":")[0] for span in spans)

    alone, together = (run_ranks(2, lambda at, b=bulks: rank(at, b))[0] for bulks in ((), (7,)))
    assert set(alone) == {f"p{i}" for i in range(7)}
    assert set(together) == {"p0 .. p6"}
    assert together.total() <= 4 * max(alone.values()) < alone.total()


def test_the_norm_of_all_gradients_is_clipped_in_bulks_as_without() -> None:
    scheme = make_scheme(None, momentum=Momentum(clip=1.0))
    bulks, alone = (run_ranks(2, lambda at, b=b: in_bulk(at, plan_of("ring", None, b), scheme)) for b in (BULKS, ()))
    for each, expected in zip(bulks[0][0], alone[0][0], strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-6)
        assert np.linalg.norm(each) < 1.0


def test_what_has_come_of_a_bulk_goes_at_the_end_and_before_a_bucket_that_is_not_of_it() -> None:
    """Parameters 1 and 4 have no gradient; ranks start the others in one order, and all of them arrive."""

    def rank(transport):
        exchange = exchange_for(transport, plan_of("ring", None, (3, 1, 3)), make_scheme(None))
        values = gradients(transport.rank, 0)
        exchange.begin()
        done = []
        handles = [
            exchange.start(exchange.bucket([f"p{i}"], [NUMELS[i]]), values[i], lambda i=i: done.append(i))
            for i in (0, 2, 3, 6, 5)
        ]
        with pytest.raises(PlanError, match=r"bucket 'p5' is waited for, and its bulk is not whole"):
            exchange.wait(handles[-1])
        exchange.finish()
        for handle in handles:
            exchange.wait(handle)
        names = {each.name for each in exchange.used}
        exchange.close()
        return values, names, sorted(done)

    for values, names, done in run_ranks(2, rank):
        assert names == {"p0 .. p2", "p3", "p6 .. p5"}
        assert done == [0, 2, 3, 5, 6]
        for index in done:
            mean = (gradients(0, 0)[index] + gradients(1, 0)[index]) / 2
            np.testing.assert_allclose(values[index], mean, rtol=1e-6, atol=1e-7)


def test_a_gradient_of_a_bulk_that_is_not_finite_is_named_and_fails_all_its_buckets() -> None:
    def rank(transport):
        exchange = exchange_for(transport, plan_of("ring", "onebit", (7,)), make_scheme("onebit"))
        values, failed = gradients(transport.rank, 0), []
        values[3][5] = np.nan if transport.rank == 1 else 1.0
        exchange.begin()
        handles = [
            exchange.start(exchange.bucket([f"p{i}"], [numel]), each, failed=lambda _, i=i: failed.append(i))
            for i, (numel, each) in enumerate(zip(NUMELS, values, strict=True))
        ]
        with pytest.raises(NonFiniteError, match="the gradient of 'p3' holds NaN"):
            exchange.wait(handles[0])
        exchange.close()
        return failed

    assert run_ranks(2, rank) == [list(range(7))] * 2


def test_an_iteration_that_is_left_with_a_bulk_begun_drops_it() -> None:
    def rank(transport):
        exchange = exchange_for(transport, plan_of("ring", None, (7,)), make_scheme(None))
        buckets = [exchange.bucket([f"p{i}"], [numel]) for i, numel in enumerate(NUMELS)]
        exchange.begin()
        exchange.start(buckets[0], np.full(NUMELS[0], np.nan, np.float32))  # and then the backward pass raised
        exchange.begin()
        values = gradients(transport.rank, 0)
        for handle in [exchange.start(*each) for each in zip(buckets, values, strict=True)]:
            exchange.wait(handle)
        exchange.close()
        return values

    for values in run_ranks(2, rank):
        assert all(np.isfinite(each).all() for each in values)
