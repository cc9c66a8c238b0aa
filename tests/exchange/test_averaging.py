"""What an exchange keeps of a gradient depends on its codec."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exchange.parcels import average
from penstock.codecs.registry import make_codec
from penstock.errors import PlanError
from penstock.exchange.arrays import NumpyArrays
from penstock.exchange.averaging import Averaging
from penstock.exchange.compression import Scheme, make_scheme
from penstock.exchange.momentum import Momentum
from penstock.exchange.parameter_state import Memory
from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.planning.decide import decide
from penstock.planning.explain import explain
from penstock.planning.observed import Drift
from penstock.runtime.communicator import Communicator
from penstock.runtime.transport.memory import Fabric
from penstock.torch.checkpoint import TorchMemory
from penstock.trace import Tensor, Trace
from runtime.threads import run_ranks


def exchanged(codec: str, iterations: int = 3) -> TorchMemory:
    communicator = Communicator(Fabric(1).transport(0))
    memory = TorchMemory(make_scheme(codec))
    exchange = Averaging(communicator, memory, leaves_out=False)
    for _ in range(iterations):
        values = torch.linspace(-1, 1, 2000)
        average(exchange, values, Route("ring", codec))
    return memory


def test_a_codec_whose_noise_exceeds_what_it_rounds_keeps_no_residual() -> None:
    assert exchanged("qsgd").residuals.values() == {}
    assert exchanged("onebit").residuals.values()["weight"].any()


@pytest.mark.parametrize(("servers", "words"), [(0, "and 0 of these are made servers"), (2, None)])
def test_ranks_that_train_are_no_servers_of_a_strategy(servers: int, words: str | None) -> None:
    """What they give would count as zeros, and they need not get the average."""
    communicator = Communicator(Fabric(4).transport(0))
    averaging = Averaging(communicator, TorchMemory(Scheme()), leaves_out=False, servers=servers)
    route = Route("parameter_server(servers=2, dedicated=true)")
    with pytest.raises(PlanError, match=words) if words else nullcontext():
        averaging.parcel(["weight"], [8], route, 0, "float32")


def test_a_plan_with_such_a_codec_says_so() -> None:
    trace = Trace("model", "cpu", 1, "float32", 0.0, (Tensor("weight", 2000, 1e-3),))
    routes = [Route("ring", codec) for codec in ("qsgd", "onebit")]
    network = Network(2, 1e-4, 1e-9, 1e-10, all_reduce={str(route): LinearCost(1e-3, 1e-9) for route in routes})
    decision = decide(trace, network, "single", routes)
    note = "qsgd travels without error feedback: its noise is larger than what it rounds, a residual would grow"
    assert decision.notes == (note,)
    assert note in explain(decision, "", 0, 0, [], Drift(0.0)).splitlines()


NUMEL = 64
EXACT = "topk(density=0.25)"  # sends values as they are
GRADIENT = torch.arange(-32, 32) / 8  # dyadic, so that sums are exact


def one_rank(memory: TorchMemory, leaves_out: bool = False) -> Averaging:
    communicator = Communicator(Fabric(1).transport(0))
    return Averaging(communicator, memory, leaves_out)


def test_what_a_codec_left_is_sent_as_soon_as_its_bucket_travels_dense() -> None:
    memory = TorchMemory(make_scheme(EXACT))
    exchange, applied = one_rank(memory), torch.zeros(NUMEL)
    for codec in (EXACT, EXACT, None, None):
        values = GRADIENT.clone()
        average(exchange, values, Route("ring", codec))
        applied += values
    assert memory.residuals.values() == {}
    np.testing.assert_array_equal(applied, 4 * GRADIENT)


def test_what_a_codec_left_is_handed_to_one_that_keeps_nothing() -> None:
    memory = TorchMemory(make_scheme(EXACT))
    exchange = one_rank(memory)
    average(exchange, torch.ones(NUMEL), Route("ring", EXACT))
    owed = memory.residuals.values()["weight"]
    values = torch.zeros(NUMEL)
    average(exchange, values, Route("ring", "qsgd(bits=2)"))
    assert memory.residuals.values() == {}
    assert owed.any()
    assert values.any()  # rounded at random, so no more can be said


def test_a_step_that_dense_gradients_spoil_takes_back_what_others_sent() -> None:
    memory = TorchMemory(make_scheme(EXACT), on_nonfinite="skip")
    exchange = one_rank(memory)
    average(exchange, GRADIENT.clone(), Route("ring", EXACT), ("a",))
    before = memory.state_dict(0, 1)["memories"]["residual"]["a"].numpy()
    average(exchange, GRADIENT.clone(), Route("ring", EXACT), ("a",))
    average(exchange, torch.full((3,), torch.inf), Route("ring"), ("b",), is_first=False)
    after = memory.state_dict(0, 1)["memories"]["residual"]["a"].numpy()
    np.testing.assert_array_equal(after, before)


def test_so_does_one_that_small_tensors_spoil() -> None:
    memory = TorchMemory(make_scheme(EXACT, dense_below=4), on_nonfinite="skip")
    values = torch.cat([GRADIENT, torch.full((3,), torch.inf)])
    average(one_rank(memory), values, Route("ring", EXACT), ("a", "b"), (NUMEL, 3))
    assert memory.has_nonfinite


def test_a_tensor_without_a_gradient_keeps_what_it_owes_and_its_velocity() -> None:
    memory = TorchMemory(make_scheme(EXACT, momentum=Momentum(0.5)))
    exchange = one_rank(memory, leaves_out=True)
    average(exchange, GRADIENT.clone(), Route("ring", EXACT))
    before = memory.state_dict(0, 1)["memories"]
    values = torch.zeros(NUMEL)
    average(exchange, values, Route("ring", EXACT))
    after = memory.state_dict(0, 1)["memories"]
    assert not values.any()
    for kind in ("residual", "velocity"):
        assert before[kind]["weight"].any()
        np.testing.assert_array_equal(after[kind]["weight"], before[kind]["weight"])


def test_gradients_of_64_bits_are_compressed_as_those_of_32_are() -> None:
    found = []
    for values in (GRADIENT.double(), GRADIENT.clone()):
        average(one_rank(TorchMemory(make_scheme("onebit"))), values, Route("all_gather", "onebit"))
        found.append(values.numpy())
    np.testing.assert_array_equal(*found)
    assert len(np.unique(found[0])) == 2


def test_gradients_of_64_bits_are_clipped_too() -> None:
    memory = TorchMemory(make_scheme(None, momentum=Momentum(clip=1.0)))
    values = torch.full((4,), 3.0, dtype=torch.float64)
    one_rank(memory).clip([values])
    np.testing.assert_allclose(values, 0.5)


def test_a_residual_that_is_not_finite_is_noted_by_the_rank_that_receives_it() -> None:
    for codec in ("sparse(density=0.1)", "onebit"):
        sender = make_codec(codec, 0, on_nonfinite="note")
        payload, out = np.zeros(sender.max_nbytes(NUMEL), np.uint8), np.zeros(NUMEL, np.float32)
        sender.bind_encode(np.ones(NUMEL, np.float32), np.full(NUMEL, np.inf, np.float32), payload)()
        receiver = make_codec(codec, 1, on_nonfinite="note")
        receiver.bind_decode(payload, out, adds=False)()
        assert receiver.saw_nonfinite()


def on_ranks(
    world_size: int, debts: dict[int, float], route: Route, steps: int
) -> list[tuple[torch.Tensor, TorchMemory]]:
    """Exchange dyadic gradients on several ranks, some of which owe something to begin with; return sum and memory."""

    def rank(transport):
        memory = TorchMemory(make_scheme(route.codec))
        communicator = Communicator(transport, timeout_seconds=120, host=lambda: HOSTS[transport.rank])
        exchange = Averaging(communicator, memory, leaves_out=False)
        if transport.rank in debts:
            memory.residuals.load({"weight": np.full(NUMEL, debts[transport.rank], np.float32)})
        applied = torch.zeros(NUMEL)
        for _ in range(steps):
            values = GRADIENT.clone()
            average(exchange, values, route)
            applied += values
        return applied, memory

    return run_ranks(world_size, rank)


SIZES = {"a": 37, "b": 3000, "c": 5}  # the second is cut into pieces
WAYS = st.sampled_from(
    [
        *(Route("ring"), Route("parameter_server", None, 3), Route("ring", EXACT), Route("ring", EXACT, 5)),
        *(Route("parameter_server", EXACT, 2), Route("all_gather", EXACT, 3)),
    ]
)
PLANS = st.lists(
    st.tuples(st.sampled_from(["a|b|c", "ab|c", "a|bc", "abc"]), st.tuples(WAYS, WAYS, WAYS)), min_size=2, max_size=6
)


@given(st.sampled_from([1, 2, 4]), PLANS)
@settings(max_examples=25, deadline=None)
def test_whatever_becomes_of_buckets_routes_and_pieces_nothing_is_lost_and_ranks_stay_alike(world_size, plans) -> None:
    """Before every step each bucket may change from compressed to dense and back, and its number of pieces."""

    def rank(transport):
        memory = TorchMemory(make_scheme(EXACT))
        exchange = Averaging(Communicator(transport, timeout_seconds=120), memory, leaves_out=False)
        generator = np.random.default_rng(transport.rank)
        history, applied, given = [], dict.fromkeys(SIZES, 0.0), dict.fromkeys(SIZES, 0.0)
        for buckets, routes in plans:
            for index, (names, route) in enumerate(zip(buckets.split("|"), routes, strict=False)):
                sizes = tuple(SIZES[name] for name in names)
                parts = [generator.integers(-512, 513, size).astype(np.float32) / 64 for size in sizes]
                values = torch.from_numpy(np.concatenate(parts))
                average(exchange, values, route, tuple(names), sizes, index == 0)
                for name, part, result in zip(names, parts, torch.split(values, list(sizes)), strict=True):
                    given[name], applied[name] = given[name] + part, applied[name] + result.numpy()
            history.append((dict(given), dict(applied), memory.residuals.values()))
        return history

    ranks = run_ranks(world_size, rank)
    for step, (buckets, routes) in enumerate(plans):
        for name, size in SIZES.items():
            results = [history[step][1][name] for history in ranks]
            owed = [history[step][2].get(name, np.zeros(size, np.float32)) for history in ranks]
            for other in results[1:]:
                np.testing.assert_array_equal(other, results[0])
            wanted = sum(history[step][0][name] for history in ranks) / np.float32(world_size)
            np.testing.assert_array_equal(results[0] + sum(owed), wanted)
            bucket = next(index for index, names in enumerate(buckets.split("|")) if name in names)
            if routes[bucket].codec is None:
                assert not any(each.any() for each in owed)  # what was owed is paid


def test_some_ranks_only_may_owe_something_to_a_codec_that_keeps_nothing() -> None:
    """As after a restart with more ranks: those that are new owe nothing."""
    ranks = on_ranks(2, {0: 4.0}, Route("ring", "qsgd"), steps=3)
    torch.testing.assert_close(ranks[0][0], ranks[1][0], rtol=0, atol=0)
    assert all(memory.residuals.values() == {} for _, memory in ranks)


HOSTS = "abba"  # of ranks, where nobody says how many there are in a node


@pytest.mark.parametrize(
    ("strategy", "leads"),
    [
        ("hierarchical", [True, True, False, False]),
        ("hierarchical(ranks_per_node=4)", [True, False, False, False]),
        ("hierarchical(ranks_per_node=3, outer=all_gather)", [True, False, False, True]),
    ],
)
def test_a_rank_that_encodes_nothing_sends_what_it_owes_to_the_one_that_does(strategy: str, leads: list[bool]) -> None:
    world_size, steps = 4, 3
    ranks = on_ranks(world_size, dict.fromkeys(range(world_size), 8.0), Route(strategy, EXACT), steps)
    kept = [memory.residuals.values().get("weight", np.zeros(NUMEL)) for _, memory in ranks]
    assert [bool(each.any()) for each in kept] == leads
    for applied, _ in ranks:
        np.testing.assert_array_equal(applied.numpy() + sum(kept), steps * GRADIENT.numpy() + world_size * 8)


class Doubling:
    """Messages between devices of two ranks that have the same values."""

    sent_nbytes = 0

    def all_reduce(self, values) -> None:
        values *= 2

    def behind(self, work) -> None:
        work()


class Momentums:
    """What an optimizer that exchanges its momentum says: half of it is sent, twice what arrives is taken."""

    def __init__(self, spec: str | None) -> None:
        self.spec = spec

    def codec(self, planned: str) -> str | None:
        return self.spec

    def before(self, parts, loss_scale: float) -> None:
        for _, part in parts:
            part *= 0.5

    def after(self, parts) -> None:
        for _, part in parts:
            part *= 2.0


class OnDevice(NumpyArrays):
    """Arrays that are said to lie on a device."""

    def device(self, values: np.ndarray) -> str:
        return "a device"


def asked_of_a_device(memory: Memory, planned: str | None, answer: bool = True) -> tuple[bool, list[str]]:
    """Return whether a bucket on a device is queued, and which codecs had to be able to."""
    averaging, asked = one_rank(memory), []
    averaging._communicator.messages = Doubling()
    averaging._communicator.queues = lambda codec, device: asked.append(codec.name.split("(")[0]) or answer
    route = Route("native") if planned is None else Route("ring", planned)
    return averaging.queues(averaging.parcel(["weight"], [NUMEL], route, 0, "float32"), np.zeros(NUMEL)), asked


def test_momentum_and_small_tensors_are_queued_on_a_device_by_the_codec_that_carries_them() -> None:
    memory = Memory(make_scheme("onebit"), arrays=OnDevice())
    memory.moments = Momentums("blocks(bits=4)")
    assert asked_of_a_device(memory, "onebit") == (True, ["blocks"])
    assert asked_of_a_device(memory, "onebit", answer=False) == (False, ["blocks"])
    memory.moments = Momentums(None)
    assert asked_of_a_device(memory, "onebit") == (True, [])  # it travels dense
    small = Memory(make_scheme("onebit", dense_below=9), arrays=OnDevice())
    assert asked_of_a_device(small, "onebit") == (True, ["onebit"])
    skips = Memory(make_scheme("onebit"), on_nonfinite="skip", arrays=OnDevice())
    assert asked_of_a_device(skips, "onebit") == (False, [])


def test_small_tensors_of_a_queued_bucket_travel_in_one_dense_message_of_the_device() -> None:
    averaging = one_rank(Memory(make_scheme("bf16", dense_below=4)))
    averaging._communicator.messages = Doubling()
    values = np.array([1.001, 2.0, 4.0, 1.0, 1.0, 1.0, 1.0, 3.003], np.float32)
    expected = values * np.array([2, 2, 2, 1, 1, 1, 1, 2], np.float32)  # to the bit where dense
    parcel = averaging.parcel(["a", "b", "c"], [3, 4, 1], Route("ring", "bf16"), 0, "float32")
    averaging.begin()
    averaging.average(parcel, values, queued=True)
    np.testing.assert_array_equal(values, expected)


def test_momentum_of_an_optimizer_goes_out_and_comes_back_but_for_small_tensors() -> None:
    memory = Memory(make_scheme("bf16", dense_below=4))
    memory.moments = Momentums("bf16")
    values = np.array([1.0, 2.0, 4.0, 1.0, 1.0, 1.0, 1.0], np.float32)
    average(one_rank(memory), values, Route("ring", "bf16"), ("a", "b"), (3, 4))
    np.testing.assert_array_equal(values, [1, 2, 4, 1, 1, 1, 1])
