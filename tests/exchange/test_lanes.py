"""Buckets in lanes: the same bits as one after the other, whenever they become ready, and nothing waits for ever."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import NonFiniteError
from penstock.exchange.compression import make_scheme
from penstock.exchange.exchange import Exchange
from penstock.exchange.parameter_state import Memory
from penstock.plan import Bucket, Plan, Route
from penstock.runtime.communicator import Communicator
from penstock.runtime.request import plan_composition
from penstock.verify import verify
from runtime.threads import run_ranks

NUMELS = (700, 37, 1, 1200, 64, 300, 5)  # of seven buckets
TIMEOUT = 60.0


def gradients(rank: int, step: int) -> list[np.ndarray]:
    generator = np.random.default_rng([rank, step])
    return [generator.standard_normal(numel).astype(np.float32) for numel in NUMELS]


def trained(
    transport, lanes: int, codec: str | None, route: Route, plan: Plan | None = None, pause=None, halves: bool = False
):
    """Return the averages of three steps, and what each parameter is owed."""
    memory = Memory(make_scheme(codec))
    communicator = Communicator(transport, timeout_seconds=TIMEOUT)
    exchange = Exchange(communicator, memory=memory, route=route, lanes=lanes, halves=halves)
    if plan is not None:
        exchange.follow(plan)
    buckets = [exchange.bucket([f"p{index}"], [numel]) for index, numel in enumerate(NUMELS)]
    found = []
    for step in range(3):
        exchange.begin()
        values, handles = gradients(transport.rank, step), []
        for index, (bucket, each) in enumerate(zip(buckets, values, strict=True)):
            if pause is not None:
                pause(transport.rank, step, index)
            handles.append(exchange.start(bucket, each))
        for handle in handles:
            exchange.wait(handle)
        found += values
    exchange.close()
    return found, exchange.state_dict()["memories"]["residual"]


@pytest.mark.parametrize(
    ("codec", "strategy"),
    [
        (None, "ring"),
        ("onebit", "ring"),
        ("terngrad(bitwidth=2)", "parameter_server"),
        ("sparse(density=0.05)", "gtopk"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_lanes_change_no_bit(codec: str | None, strategy: str, world_size: int) -> None:
    route = Route(strategy, codec)
    one, four = (run_ranks(world_size, lambda at, n=n: trained(at, n, codec, route)) for n in (1, 4))
    for (averages, owed), (expected, kept) in zip(four, one, strict=True):
        for each, other in zip(averages, expected, strict=True):
            np.testing.assert_array_equal(each, other)
        assert owed.keys() == kept.keys()
        for name in owed:
            np.testing.assert_array_equal(owed[name], kept[name])


@pytest.mark.parametrize(
    ("codec", "strategy", "lanes"),
    [
        (None, "ring", 2),
        (None, "double_tree", 4),
        ("onebit", "ring", 1),
        ("terngrad(bitwidth=2)", "parameter_server", 2),
        ("sparse(density=0.05)", "gtopk", 2),
    ],
)
def test_halves_change_no_bit(codec: str | None, strategy: str, lanes: int) -> None:
    """The second halves of all buckets come after all first ones, and in the opposite order."""
    route = Route(strategy, codec)
    whole = run_ranks(3, lambda at: trained(at, lanes, codec, route))
    cut = run_ranks(3, lambda at: trained(at, lanes, codec, route, halves=True))
    for (averages, owed), (expected, kept) in zip(cut, whole, strict=True):
        for each, other in zip(averages, expected, strict=True):
            np.testing.assert_array_equal(each, other)
        assert owed.keys() == kept.keys()
        for name in owed:
            np.testing.assert_array_equal(owed[name], kept[name])


def test_buckets_of_different_routes_travel_together_and_the_engines_own_in_one_order() -> None:
    routes = ("native", "ring", "native", "parameter_server", "native", "ring", "native")
    plan = Plan("m", 3, "exact", tuple(Bucket((f"p{i}",), 4 * NUMELS[i], route) for i, route in enumerate(routes)))
    one, four = (run_ranks(3, lambda at, n=n: trained(at, n, None, Route("ring"), plan)[0]) for n in (1, 4))
    for averages, expected in zip(four, one, strict=True):
        for each, other in zip(averages, expected, strict=True):
            np.testing.assert_array_equal(each, other)


@pytest.mark.parametrize("late", range(3))
def test_a_bucket_is_done_though_later_ones_are_not_ready_and_ranks_are_apart(late: int) -> None:
    """One rank starts a bucket only when the others have the averages of all before it that are not in its lane."""
    barrier = threading.Barrier(3)

    def rank(transport):
        exchange = Exchange(Communicator(transport, timeout_seconds=TIMEOUT), route=Route("ring"), lanes=2)
        buckets = [exchange.bucket([f"p{index}"], [numel]) for index, numel in enumerate(NUMELS)]
        exchange.begin()
        values, handles = gradients(transport.rank, 0), []
        for bucket, each in zip(buckets, values, strict=True):
            if transport.rank == late and handles:
                exchange.wait(handles[-1])  # nothing after it has been started here
            handles.append(exchange.start(bucket, each))
        for handle in handles:
            exchange.wait(handle)
        barrier.wait(TIMEOUT)
        return values

    for found in run_ranks(3, rank):
        for index, each in enumerate(found):
            mean = sum(gradients(r, 0)[index] for r in range(3)) / 3
            np.testing.assert_allclose(each, mean, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_stops_no_other_bucket_of_its_iteration() -> None:
    """Ranks would not agree on which of them have been started by then."""

    def rank(transport):
        exchange = Exchange(
            Communicator(transport, timeout_seconds=TIMEOUT), memory=Memory(make_scheme("onebit")), lanes=4
        )
        buckets = [exchange.bucket([f"p{index}"], [numel]) for index, numel in enumerate(NUMELS)]
        said = []
        for _ in range(2):
            exchange.begin()
            values = [np.ones(numel, np.float32) for numel in NUMELS]
            values[3][5] = np.nan if transport.rank == 1 else 1.0
            handles = [exchange.start(bucket, each) for bucket, each in zip(buckets, values, strict=True)]
            for handle in handles:
                handle.future.result(TIMEOUT)
            for handle in handles:
                with pytest.raises(NonFiniteError) as error:
                    exchange.wait(handle)
                said.append(str(error.value)[:22])
            sums = [float(each.sum()) for index, each in enumerate(values) if index != 3]
        return set(said), sums

    for said, sums in run_ranks(2, rank):
        assert said == {"the gradient of 'p3' h"}
        assert sums == [float(numel) for index, numel in enumerate(NUMELS) if index != 3]  # the second was not begun


def test_what_each_bucket_sent_is_counted_in_its_own_lane() -> None:
    def rank(transport):
        exchange = Exchange(Communicator(transport, timeout_seconds=TIMEOUT), route=Route("ring"), lanes=4)
        buckets = [exchange.bucket([f"p{index}"], [numel]) for index, numel in enumerate(NUMELS)]
        for step in range(2):  # in the first one ranks compare programs, too
            exchange.begin()
            before, values = exchange.traffic().sent_nbytes, gradients(transport.rank, step)
            for handle in [exchange.start(bucket, each) for bucket, each in zip(buckets, values, strict=True)]:
                exchange.wait(handle)
        return {each.name: each.sent_nbytes for each in exchange.used}, exchange.traffic().sent_nbytes - before

    sent, total = run_ranks(2, rank)[0]
    assert [sent[f"p{index}"] for index in (0, 3, 4)] == [4 * NUMELS[index] for index in (0, 3, 4)]  # two halves
    assert total == sum(sent.values())


def test_of_several_gradients_that_are_not_finite_every_rank_names_the_first() -> None:
    """Rank 1 is held up in its first bucket until the fourth, in another lane, has failed."""

    def rank(transport) -> str:
        memory = Memory(make_scheme("onebit"))
        communicator = Communicator(transport, timeout_seconds=TIMEOUT)
        exchange = Exchange(communicator, memory=memory, route=Route("ring", "onebit"), lanes=4)
        buckets = [exchange.bucket([f"p{index}"], [numel]) for index, numel in enumerate(NUMELS)]
        inner, later = exchange._averaging.average, threading.Event()

        def average(parcel, *rest) -> None:
            if transport.rank == 1 and parcel.name == "p0":
                later.wait(TIMEOUT)
            try:
                inner(parcel, *rest)
            finally:
                if parcel.name == "p3":
                    later.set()

        exchange._averaging.average = average
        values = gradients(transport.rank, 0)
        for index in (0, 3):
            values[index][0] = np.nan
        exchange.begin()
        handles = [exchange.start(bucket, each) for bucket, each in zip(buckets, values, strict=True)]
        with pytest.raises(NonFiniteError) as caught:
            exchange.wait(handles[3])
        exchange.close()
        return str(caught.value)

    first, second = run_ranks(2, rank)
    assert first == second
    assert "the gradient of 'p0' holds NaN" in first


def test_second_halves_begin_after_all_first_ones_with_the_bucket_that_was_started_last() -> None:
    def rank(transport):
        exchange = Exchange(Communicator(transport, timeout_seconds=TIMEOUT), route=Route("ring"), lanes=1, halves=True)
        buckets = [exchange.bucket([f"p{index}"], [numel]) for index, numel in enumerate(NUMELS)]
        exchange.begin()
        values = gradients(transport.rank, 0)
        handles = [exchange.start(bucket, each) for bucket, each in zip(buckets, values, strict=True)]
        exchange.finish()
        exchange.wait(handles[0])
        exchange.close()
        return [each.name for each in exchange.sent], [each.sent_nbytes for each in exchange.used]

    order = [f"p{index}" for index in range(len(NUMELS))]
    for names, sent in run_ranks(2, rank):
        assert names == order + order[::-1]
        assert sent[-1] >= 4 * NUMELS[0]  # both halves: half of it twice, and once what ranks compare


def test_the_plan_that_an_exchange_follows_is_proved_as_its_ranks_run_it() -> None:
    """What `verify` proves of a plan are the very instructions and lanes that each rank has prepared."""
    routes = ("ring", None), ("ring", "onebit"), ("parameter_server", "onebit"), ("ring", "onebit"), ("native", None)
    routes = (*routes, ("parameter_server", "terngrad(bitwidth=2)"), ("ring", "onebit"))
    plan = Plan(
        "toy",
        3,
        "any",
        tuple(
            Bucket((f"p{i}",), 4 * numel, *route) for i, (numel, route) in enumerate(zip(NUMELS, routes, strict=True))
        ),
    )
    composition = plan_composition(plan, {f"p{i}": numel for i, numel in enumerate(NUMELS)})
    assert verify(composition).proved

    def work(transport):
        exchange = Exchange(Communicator(transport, timeout_seconds=TIMEOUT))
        exchange.follow(plan)
        buckets = [exchange.bucket(each.tensors, [each.nbytes // 4]) for each in plan.buckets]
        exchange.begin()
        for handle in [exchange.start(*each) for each in zip(buckets, gradients(transport.rank, 0), strict=True)]:
            exchange.wait(handle)
        exchange.close()
        parcels = [bucket.parcels[0] for bucket in buckets]
        calls = [(each.call or each.dense_call).__self__ for each in parcels]
        return [(each.lane, call._prepared.part) for each, call in zip(parcels, calls, strict=True)]

    for rank, found in enumerate(run_ranks(3, work)):
        programs = [program.part(rank) for program in composition.programs]
        assert [lane for lane, _ in found] == list(composition.lane_of)
        assert [part.instructions for _, part in found] == [part.instructions for part in programs]


def test_a_bulk_takes_the_instructions_of_one_bucket_and_not_of_all_of_them() -> None:
    buckets = tuple(Bucket((f"p{i}",), 4 * numel, "ring", "onebit") for i, numel in enumerate(NUMELS))
    alone = Plan("toy", 2, "wfbp", buckets)

    def notes(transport, plan: Plan) -> int:
        exchange = Exchange(Communicator(transport, timeout_seconds=TIMEOUT), memory=Memory(make_scheme("onebit")))
        exchange.follow(plan)
        sizes = [[NUMELS[int(name[1:])] for name in each.tensors] for each in plan.messages]
        made = [exchange.bucket(each.tensors, size) for each, size in zip(plan.messages, sizes, strict=True)]
        for step in range(2):
            exchange.record(step == 1)
            exchange.begin()
            values = [np.ones(sum(size), np.float32) for size in sizes]
            for handle in [exchange.start(*each) for each in zip(made, values, strict=True)]:
                exchange.wait(handle)
        found = len(exchange.communicator.recorder.notes)
        exchange.close()
        return found

    each, together = (run_ranks(2, lambda at, p=p: notes(at, p))[0] for p in (alone, replace(alone, bulks=(7,))))
    assert 3 * together < each


def test_threads_start_with_the_exchange_not_with_the_plan_that_needs_them() -> None:
    def work(transport) -> tuple[int, int]:
        exchange = Exchange(Communicator(transport, timeout_seconds=TIMEOUT), route=Route("ring"), lanes=4)
        before = threading.active_count()
        exchange.begin()
        handles = []
        for index, values in enumerate(gradients(transport.rank, 0)):
            handles.append(exchange.start(exchange.bucket([f"p{index}"], [values.size]), values))
        for handle in handles:
            exchange.wait(handle)
        return before, threading.active_count()

    [(before, after)] = run_ranks(1, work)
    assert after == before
