"""Low-rank factors against published algorithms written anew, and what an exchange promises of every codec."""

import copy
import pickle

import numpy as np
import pytest
import torch

from exchange.parcels import average
from penstock.codecs.low_rank import Factoring, LowRank, Matrix, orthonormal
from penstock.codecs.registry import codec_digest, fingerprint, make_codec
from penstock.errors import CodecError, FormatError, NonFiniteError
from penstock.exchange.arrays import NumpyArrays
from penstock.exchange.averaging import Averaging
from penstock.exchange.compression import Compression, is_safe_for_adam, make_scheme
from penstock.exchange.exchange import Exchange
from penstock.exchange.factors import from_logical, matrix_of, to_logical
from penstock.exchange.parameter_state import Memory
from penstock.exchange.residuals import Layout
from penstock.plan import Bucket, Plan, Route
from penstock.planning.candidates import candidates
from penstock.planning.inputs import check_route
from penstock.runtime.communicator import Communicator
from penstock.runtime.device.queued import Bindings
from penstock.runtime.measure_network import measure_line
from penstock.torch.checkpoint import TorchMemory
from runtime.threads import outcomes, run_ranks

SHAPES = {"conv": (24, 6, 3, 3), "bias": (24,), "linear": (40, 30), "tiny": (3, 3), "norm": (30,)}
NUMEL = sum(int(np.prod(shape)) for shape in SHAPES.values())
ROUTES = [Route("native", "lowrank(rank=3)"), Route("ring", "lowrank(rank=3, rounds=2)")]


def gradient(rank: int, step: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> np.ndarray:
    numel = sum(int(np.prod(shape)) for shape in shapes.values())
    return np.random.default_rng([rank, step]).standard_normal(numel, np.float32)


def memory_for(codec: str, shapes: dict[str, tuple[int, ...]] = SHAPES, **options) -> Memory:
    memory = Memory(make_scheme(codec), **options)
    memory.know({name: Layout.contiguous(shape) for name, shape in shapes.items()})
    return memory


def train(transport, route: Route, steps: range, memory: Memory, shapes=SHAPES, **options) -> list[np.ndarray]:
    exchange = Exchange(Communicator(transport, timeout_seconds=120), memory=memory, route=route, **options)
    bucket = exchange.bucket(list(shapes), [int(np.prod(shape)) for shape in shapes.values()])
    found = []
    for step in steps:
        exchange.begin()
        values = gradient(transport.rank, step, shapes)
        exchange.wait(exchange.start(bucket, values))
        found.append(values)
    exchange.close()
    return found


def parts(values: np.ndarray, shapes=SHAPES) -> dict[str, np.ndarray]:
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])[:-1]
    return {name: each.reshape(SHAPES[name]) for name, each in zip(shapes, np.split(values, ends), strict=True)}


def published(name: str, first: np.ndarray, rounds: int, world_size: int, steps: int) -> list[np.ndarray]:
    """The averages of one matrix, by PowerSGD (two rounds) or ACP-SGD in float64, with numpy's QR."""
    owed = [np.zeros(1)] * world_size
    factor, transposed, found = first.astype(np.float64), False, []
    for step in range(steps):
        own = [
            parts(gradient(rank, step))[name].reshape(len(parts(gradient(0, 0))[name]), -1)
            for rank in range(world_size)
        ]
        own = [each.astype(np.float64) / world_size + kept for each, kept in zip(own, owed, strict=True)]
        if rounds == 2:
            basis = np.linalg.qr(sum(each @ factor for each in own))[0]
            shares = [basis @ (basis.T @ each) for each in own]
            factor = np.linalg.qr(sum(each.T @ basis for each in own))[0]
        else:
            turned = [each.T if transposed else each for each in own]
            shares = [each @ factor @ factor.T for each in turned]
            factor = np.linalg.qr(sum(each @ factor for each in turned))[0]
            shares = [each.T if transposed else each for each in shares]
            transposed = not transposed
        owed = [each - share for each, share in zip(own, shares, strict=True)]
        found.append(sum(shares))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_averages_are_those_of_the_published_algorithms_and_all_ranks_get_the_same_bits(route, world_size) -> None:
    def body(transport):
        memory = memory_for(route.codec)
        return train(transport, route, range(6), memory), memory

    ranks = run_ranks(world_size, body)
    for step in range(6):
        for found, _ in ranks[1:]:
            np.testing.assert_array_equal(found[step], ranks[0][0][step])
        mean = sum(gradient(rank, step).astype(np.float64) for rank in range(world_size)) / world_size
        for name in ("bias", "tiny", "norm"):  # a product would not make these smaller
            np.testing.assert_allclose(parts(ranks[0][0][step])[name], parts(mean)[name], atol=1e-6)
    rounds = make_codec(route.codec).rounds
    for name in ("conv", "linear"):
        rows, columns = len(parts(mean)[name]), parts(mean)[name].size // len(parts(mean)[name])
        first = Factoring(make_codec(route.codec), [], []).first(Matrix(0, rows, columns), name, mean).values
        expected = published(name, first, rounds, world_size, 6)
        for step in range(6):
            found = parts(ranks[0][0][step])[name].reshape(rows, columns)
            assert np.linalg.matrix_rank(found, tol=1e-4) == 3
            np.testing.assert_allclose(found, expected[step], atol=3e-4)  # spares, and float32


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_every_element_that_ranks_give_is_applied_or_owed(route) -> None:
    def body(transport):
        memory = memory_for(route.codec)
        return train(transport, route, range(9), memory), memory.residuals.values()

    ranks = run_ranks(2, body)
    applied = sum(each.astype(np.float64) for each in ranks[0][0])
    owed = sum(np.concatenate([residuals[name] for name in SHAPES]).astype(np.float64) for _, residuals in ranks)
    given = sum(gradient(rank, step).astype(np.float64) for rank in range(2) for step in range(9)) / 2
    np.testing.assert_allclose(applied + owed, given, atol=2e-5)


def test_a_run_that_is_resumed_ends_with_the_bits_of_an_unbroken_one_also_with_more_ranks_to_come() -> None:
    route = ROUTES[0]

    def body(transport):
        whole, first = memory_for(route.codec), memory_for(route.codec)
        expected = train(transport, route, range(7), whole)
        train(transport, route, range(3), first)
        return expected[3:], first.state_dict(transport.rank, 2)

    ranks = run_ranks(2, body)
    states = [pickle.loads(pickle.dumps(state)) for _, state in ranks]

    def resumed(transport):
        later = memory_for(route.codec)
        later.load_state_dicts(states, transport.rank, 2)
        return train(transport, route, range(3, 7), later)

    for found, (expected, _) in zip(run_ranks(2, resumed), ranks, strict=True):
        np.testing.assert_array_equal(found, expected)
    three = [memory_for(route.codec) for _ in range(3)]
    for rank, memory in enumerate(three):
        memory.load_state_dicts(states, rank, 3)
        np.testing.assert_array_equal(memory.factors.values()["conv"], states[0]["memories"]["factor"]["conv"])
    old = copy.deepcopy(states)
    for state in old:
        del state["memories"]["factor"]
    three[0].load_state_dicts(old, 0, 2)
    assert three[0].factors.values() == {}
    states[0]["memories"]["factor"]["linear"] = np.zeros((7, 1, 3), np.float32)
    with pytest.raises(FormatError, match=r"factor of 'linear'.*\(40, 30\), 1 for some"):
        three[0].load_state_dicts(states, 0, 2)


def test_a_step_that_is_not_finite_is_undone_with_its_factors_and_raised_by_the_tensors_name_otherwise() -> None:
    route, shapes = ROUTES[0], {"linear": (40, 30), "norm": (30,)}

    def body(transport, policy: str, bad: int):
        memory = memory_for(route.codec, shapes, on_nonfinite=policy)
        averaging = Averaging(Communicator(transport, timeout_seconds=120), memory, leaves_out=False)
        found = []
        for step in range(5):
            values = gradient(transport.rank, step if step != bad else 99, shapes)
            if step == bad and transport.rank == 1:
                values[17] = np.inf
            found.append(average(averaging, values, route, tuple(shapes), (1200, 30)))
        return found

    skipped = run_ranks(2, lambda transport: body(transport, "skip", 2))
    assert not np.isfinite(skipped[0][2]).all()

    def without(transport):
        memory = memory_for(route.codec, shapes, on_nonfinite="skip")
        averaging = Averaging(Communicator(transport, timeout_seconds=120), memory, leaves_out=False)
        steps = (0, 1, 3, 4)
        values = [gradient(transport.rank, step, shapes) for step in steps]
        return [average(averaging, each, route, tuple(shapes), (1200, 30)) for each in values]

    np.testing.assert_array_equal(np.delete(skipped[0], 2, axis=0), run_ranks(2, without)[0])
    for outcome in outcomes(2, lambda transport: body(transport, "raise", 2)):
        assert isinstance(outcome, NonFiniteError)
        assert "the gradient of 'linear' holds NaN" in str(outcome)


def test_memory_order_does_not_matter_to_what_is_sent_and_kept() -> None:
    """A channels-last convolution and a transposed matrix are averaged as their contiguous copies are."""
    shapes = {"conv": (24, 6, 3, 3), "linear": (40, 30)}
    plain = {name: torch.zeros(shape) for name, shape in shapes.items()}
    other = {"conv": plain["conv"].to(memory_format=torch.channels_last), "linear": plain["linear"].T.contiguous().T}
    found = []
    for parameters in (plain, other):
        memory = TorchMemory(make_scheme("lowrank(rank=30)"))  # more than a matrix has: dense
        memory.know_parameters(parameters)
        averaging = Averaging(Communicator(run_ranks(1, lambda transport: transport)[0]), memory, leaves_out=False)
        values = torch.ones(24 * 54 + 1200)
        average(averaging, values, Route("native", "lowrank(rank=30)"), tuple(shapes), (24 * 54, 1200))
        assert torch.equal(values, torch.ones(24 * 54 + 1200))
        assert memory.factors.values() == {}
        found.append([matrix_of(memory.layout(name), 0, LowRank(3)) for name in shapes])
    assert found[0] == [Matrix(0, 24, 54), Matrix(0, 40, 30)]
    assert found[1] == [Matrix(0, 24, 54), Matrix(0, 30, 40)]
    for name, parameter in other.items():
        layout = Layout.of(tuple(parameter.shape), parameter.stride())
        for of_rows in (True, False):
            shape = [1] * parameter.ndim if of_rows else list(parameter.shape)
            outermost = 0 if name == "conv" else 1
            shape[outermost] = parameter.shape[outermost] if of_rows else 1
            logical = np.random.default_rng(0).standard_normal((*shape, 3), np.float32)
            factor = from_logical(logical, layout)
            assert factor is not None
            assert factor.of_rows == of_rows
            np.testing.assert_array_equal(to_logical(factor, layout), logical)
    # Memory order of a channels-last factor is that of the gradient's columns.
    layout = Layout.of((24, 6, 3, 3), other["conv"].stride())
    logical = np.arange(54, dtype=np.float32).reshape(1, 6, 3, 3, 1)
    np.testing.assert_array_equal(
        from_logical(logical, layout).values[:, 0], logical[0, ..., 0].transpose(1, 2, 0).ravel()
    )


def test_a_memory_that_learns_of_another_order_keeps_its_factors() -> None:
    codec, contiguous = "lowrank(rank=2)", Layout.contiguous((12, 10, 2, 2))
    memory = Memory(make_scheme(codec))
    memory.know({"weight": contiguous})
    averaging = Averaging(Communicator(run_ranks(1, lambda transport: transport)[0]), memory, leaves_out=False)
    average(averaging, np.ones(480, np.float32), Route("native", codec))
    average(averaging, np.ones(480, np.float32), Route("native", codec))
    before = memory.factors.values()["weight"]
    assert before.shape == (1, 10, 2, 2, 2)
    memory.know({"weight": Layout.of((12, 10, 2, 2), (40, 1, 20, 10))})
    np.testing.assert_array_equal(memory.factors.values()["weight"], before)
    averaging = Averaging(Communicator(run_ranks(1, lambda transport: transport)[0]), memory, leaves_out=False)
    average(averaging, np.ones(480, np.float32), Route("native", codec))
    assert memory.factors.values()["weight"].shape == (12, 1, 1, 1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_owe_what_their_averages_are_rounded_by(dtype) -> None:
    codec = "lowrank(rank=2)"

    def body(transport):
        memory = TorchMemory(make_scheme(codec))
        memory.know({"weight": Layout.contiguous((20, 30))})
        averaging = Averaging(Communicator(transport, timeout_seconds=120), memory, leaves_out=False)
        generator = torch.Generator().manual_seed(transport.rank)
        given = [torch.randn(600, generator=generator).to(dtype) for _ in range(3)]
        applied = [average(averaging, each.clone(), Route("ring", codec)).double() for each in given]
        return (
            sum(each.double() for each in given),
            sum(applied),
            memory.residuals.values()["weight"].astype(np.float64),
        )

    (given, applied, owed), (other_given, other_applied, other_owed) = run_ranks(2, body)
    assert torch.equal(applied, other_applied)
    np.testing.assert_allclose(applied.numpy() + owed + other_owed, (given + other_given).numpy() / 2, atol=1e-4)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("case", ["random", "zero", "one column again and again", "scales apart", "one row more"])
def test_columns_are_orthonormal_whatever_they_are_made_from(kind, case) -> None:
    generator = np.random.default_rng(0)
    rows = 5 if case == "one row more" else 300
    matrix = generator.standard_normal((rows, 4)).astype(np.float32)
    if case == "zero":
        matrix[:] = 0.0
    elif case == "one column again and again":
        matrix[:] = matrix[:, :1]
    elif case == "scales apart":
        matrix *= np.float32([1e-30, 1e30, 1.0, 0.0])
    spare = generator.standard_normal((rows, 4)) / rows**0.5
    found = np.asarray(orthonormal([kind(matrix)], [kind(spare)])[0])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.T @ found, np.eye(4), atol=1e-5)
    kept = [column for column in matrix.T if column.any()]
    if case != "zero":
        for column in kept:
            unit = column / np.linalg.norm(column.astype(np.float64))
            np.testing.assert_allclose(found @ (found.T @ unit), unit, atol=2e-5)


def test_tensors_are_averaged_as_arrays_are_and_nothing_is_read_back(monkeypatch) -> None:
    """What a device is given runs on CPU tensors here, where reading a value is refused."""
    codec, matrices = LowRank(3, 2), [Matrix(0, 40, 30), Matrix(1210, 20, 24)]
    values = gradient(0, 0, {"all": (1690,)})
    found = []
    for kind in (np.copy, lambda each: torch.from_numpy(each.copy())):
        factoring = Factoring(codec, matrices, [(1200, 1210)])
        total, out = kind(values), kind(np.zeros_like(values))
        factors = [factoring.first(each, "name", total) for each in matrices]
        with monkeypatch.context() as patch:
            for name in ("item", "__bool__", "__float__", "__int__", "tolist", "cpu", "numpy"):
                patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a value was read"))
            for _ in range(3):
                total += kind(values)
                factors = factoring.average(total, out, factors, lambda _: None, lambda _: True)
        found.append([np.asarray(each) for each in (out, total, *(factor.values for factor in factors))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


class Queues:
    """What is queued on the device of one rank."""

    sent_nbytes, bindings = 0, Bindings()

    def all_reduce(self, values) -> None:
        """One rank's sum is its own."""

    def behind(self, work) -> None:
        work()

    def land(self) -> None:
        pass

    def drop(self) -> None:
        pass


class OnDevice(NumpyArrays):
    """Arrays that are said to lie on a device: whether sums are finite is heard of when their bucket comes again."""

    def device(self, values) -> str:
        return "a device"


def test_what_is_queued_on_a_device_says_so_and_has_no_instructions() -> None:
    """The second bucket is sent by the host, whose clock times it."""

    def rank(transport):
        memory = memory_for("lowrank(rank=2)", {"a": (20, 30), "b": (20, 30)}, arrays=OnDevice())
        exchange = Exchange(Communicator(transport, messages=Queues()), memory=memory)
        plan = Bucket(("a",), 2400, "native", "lowrank(rank=2)"), Bucket(("b",), 2400, "ring")
        exchange.follow(Plan("model", 2, "wfbp", plan))
        buckets = [exchange.bucket([name], [600]) for name in "ab"]
        exchange.record(True)
        exchange.begin()
        for handle in [exchange.start(each, np.ones(600, np.float32)) for each in buckets]:
            exchange.wait(handle)
        exchange.close()
        noted = {note.bucket for note in exchange.communicator.recorder.notes}
        return {each.name: each.is_queued for each in exchange.sent}, noted

    assert run_ranks(2, rank) == [({"a": True, "b": False}, {"b"})] * 2


def test_a_state_that_is_loaded_ends_what_devices_had_yet_to_say_of_the_iteration_before() -> None:
    """NaN in both buckets: the first tells of it when it comes again, the second would do so after the load."""

    def rank(transport):
        memory = memory_for("lowrank(rank=2)", {"a": (20, 30), "b": (20, 30)}, arrays=OnDevice())
        communicator = Communicator(transport, messages=Queues())
        exchange = Exchange(communicator, memory=memory, route=Route("native", "lowrank(rank=2)"))
        buckets, before = [exchange.bucket([name], [600]) for name in "ab"], [memory.state_dict(r, 2) for r in (0, 1)]
        told = []
        for value in (np.nan, 1.0, 1.0, 1.0):
            exchange.begin()
            handles = [exchange.start(each, np.full(600, value, np.float32)) for each in buckets]
            try:
                for handle in handles:
                    exchange.wait(handle)
                told.append("")
            except NonFiniteError:
                told.append("not finite")
                exchange.load_state_dict(before)
        exchange.close()
        return told

    assert run_ranks(2, rank) == [["", "not finite", "", ""]] * 2


def test_zero_gradients_stay_zero_and_absent_ones_keep_what_they_owe() -> None:
    codec, shapes = "lowrank(rank=2)", {"a": (20, 30), "b": (20, 30)}
    memory = memory_for(codec, shapes)
    averaging = Averaging(Communicator(run_ranks(1, lambda transport: transport)[0]), memory, leaves_out=True)
    values = np.zeros(1200, np.float32)
    for _ in range(3):
        assert not average(averaging, values, Route("native", codec), ("a", "b"), (600, 600)).any()
    average(averaging, gradient(0, 0, {"all": (1200,)}), Route("native", codec), ("a", "b"), (600, 600))
    owed = memory.residuals.values()["b"]
    assert owed.any()
    values = np.concatenate([gradient(0, 1, {"all": (600,)}), np.zeros(600, np.float32)])
    average(averaging, values, Route("native", codec), ("a", "b"), (600, 600))
    assert not values[600:].any()
    np.testing.assert_array_equal(memory.residuals.values()["b"], owed)


def test_bytes_are_those_of_one_factor_in_each_iteration_beside_dense_tensors() -> None:
    def body(transport):
        exchange = Exchange(Communicator(transport), memory=memory_for(ROUTES[0].codec), route=ROUTES[0])
        bucket, sent = exchange.bucket(list(SHAPES), [int(np.prod(shape)) for shape in SHAPES.values()]), []
        for step in range(4):
            exchange.begin()
            exchange.wait(exchange.start(bucket, gradient(transport.rank, step)))
            sent.append(exchange.routes_used()[0])
        exchange.close()
        return sent[2:]  # the first of each size compares the ranks' programs

    dense = 24 + 9 + 30
    for used in run_ranks(2, body):
        assert [each.route for each in used] == [str(ROUTES[0])] * 2
        assert [each.sent_nbytes for each in used] == [4 * (3 * (24 + 40) + dense), 4 * (3 * (54 + 30) + dense)]
        assert used[0].nbytes == 4 * NUMEL


def test_it_is_planned_and_measured_by_the_engines_own_all_reduce() -> None:
    scheme = make_scheme("lowrank(rank=4)")
    assert str(candidates("auto", scheme, "exact")[0]) == "native+lowrank(rank=4)"
    assert [str(each) for each in candidates("auto", scheme, "exact", "nccl", True)] == ["native+lowrank(rank=4)"]
    lines = run_ranks(2, lambda transport: measure_line(transport, "native+lowrank(rank=4)", 0.2).line)
    assert lines[0] == lines[1]
    assert lines[0].b_seconds_per_byte > 0


def test_what_does_not_make_sense_is_refused_in_words() -> None:
    with pytest.raises(CodecError, match="rank is 0; wanted a whole number"):
        Compression("lowrank(rank=0)")
    with pytest.raises(CodecError, match=r"rounds is 3; wanted 1 .ACP-SGD. or 2"):
        Compression("lowrank(rounds=3)")
    with pytest.raises(CodecError, match="no parameter 'bits'; wanted rank and rounds"):
        Compression("lowrank(bits=3)")
    with pytest.raises(CodecError, match="masking forgets the velocity"):
        Compression("lowrank", momentum=0.9)
    assert Compression("lowrank", momentum=0.9, momentum_masking=False).scheme().momentum.factor == 0.9
    with pytest.raises(CodecError, match="select='bucket' with codec 'lowrank'"):
        Compression("lowrank", select="bucket")
    with pytest.raises(CodecError, match="density or warmup with codec 'lowrank'"):
        Compression("lowrank", density=0.1)
    for strategy in ("all_gather", "gtopk"):
        with pytest.raises(CodecError, match="factors summed as they are: wanted one such as 'native'"):
            check_route(Route(strategy, "lowrank"))
    check_route(Route("hierarchical(outer=ring)", "lowrank"))
    with pytest.raises(CodecError, match="wanted no number of pieces"):
        check_route(Route("ring", "lowrank", 4))
    with pytest.raises(CodecError, match="makes no payload"):
        make_codec("lowrank").encode(None, None, None)
    averaging = Averaging(Communicator(run_ranks(1, lambda transport: transport)[0]), Memory(), leaves_out=False)
    with pytest.raises(CodecError, match="the shape of 'weight' is not known"):
        average(averaging, np.ones(600, np.float32), ROUTES[0])
    assert not is_safe_for_adam("lowrank(rank=4)")
    assert (fingerprint("lowrank(rank=4)"), codec_digest("lowrank(rank=4)")) == ("", "lowrank(rank=4)")
    assert make_codec("lowrank").name == "lowrank(rank=4)"
    assert make_codec("lowrank(rank=2, rounds=2)").name == "lowrank(rank=2, rounds=2)"
