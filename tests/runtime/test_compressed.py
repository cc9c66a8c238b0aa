"""Compressed all-reduces over the memory engine: same bits everywhere, and nothing lost."""

import contextlib
import gc
import threading
import tracemalloc
from dataclasses import replace
from functools import cache
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.compll
from penstock.codecs.dense.dense_codec import DenseCodec
from penstock.codecs.feedback import DeferredResidual
from penstock.codecs.registry import codec_names, make_codec
from penstock.errors import MismatchError, NonFiniteError, StrategyError, TransportError
from penstock.program import Op
from penstock.runtime import Communicator
from penstock.runtime.executor import WINDOW
from penstock.runtime.schedule import Do, choose_window, schedule
from penstock.runtime.transport.memory import Fabric, MemoryTransport
from penstock.strategies import Options, build_compressed, coded_names
from runtime.programs import Halves
from runtime.threads import outcomes, run_ranks

ALGORITHMS = Path(penstock.compll.__file__).parent / "algorithms"
TIMEOUT_SECONDS = 120.0  # nothing takes so long, however busy the machine
EXACT = ("topk(density=0.25)", "dgc(density=0.25)", "graddrop(density=0.05)")  # send some values as they are


def dyadic(world_size: int, numel: int, seed: int = 0) -> list[np.ndarray]:
    """Return small multiples of 1/8: their sums are exact in float32, in any order."""
    rng = np.random.default_rng((seed, world_size, numel))
    return [(rng.integers(-64, 65, numel) / 8).astype(np.float32) for _ in range(world_size)]


@cache
def compiled(name: str) -> DenseCodec:
    """Return a codec whose kernels are loaded, which takes longer than using them here."""
    codec = make_codec(name)
    values, payload = np.ones(8, np.float32), np.zeros(codec.max_nbytes(8), np.uint8)
    payload = payload[: codec.encode(values, np.zeros(8, np.float32), payload)]
    codec.decode(payload, values)
    codec.decode_add(payload, values)
    return codec


def wire(name: str, seed: int = 0) -> DenseCodec:
    return replace(compiled(name), seed=seed, _calls=count())


def reduce_all(codec, tensors, residuals, steps=1, **options):
    """All-reduce copies of `tensors` `steps` times; return what every rank holds after each step."""
    applied = []

    def rank(transport: MemoryTransport) -> list[np.ndarray]:
        communicator = Communicator(transport, TIMEOUT_SECONDS)
        own = codec(transport.rank) if callable(codec) else codec
        kept = residuals[transport.rank] if residuals is not None else None
        results = []
        for _ in range(steps):
            data = tensors[transport.rank].copy()
            communicator.all_reduce(data, codec=own, residual=kept, **options)
            results.append(data)
        return results

    for held in zip(*run_ranks(len(tensors), rank), strict=True):
        assert len({one.tobytes() for one in held}) == 1, "ranks hold different bits"
        applied.append(held[0])
    return applied


@pytest.mark.parametrize("strategy", ["ring", "parameter_server"])
@pytest.mark.parametrize("name", codec_names())
def test_every_codec_of_the_language_conserves_the_sum(name: str, strategy: str) -> None:
    tensors = dyadic(3, 5000)
    residuals = [np.zeros(5000, np.float32) for _ in tensors]
    compiled(name)  # once, not on three threads
    steps = 3
    applied = reduce_all(lambda rank: wire(name, rank), tensors, residuals, steps, strategy=strategy)
    total = steps * np.sum(tensors, axis=0, dtype=np.float64)
    found = np.sum(applied, axis=0, dtype=np.float64) + np.sum(residuals, axis=0, dtype=np.float64)
    np.testing.assert_allclose(found, total, atol=2e-3)


@pytest.mark.parametrize("strategy", coded_names())
@settings(deadline=None, max_examples=8)
@given(st.sampled_from(EXACT), st.integers(1, 7), st.integers(0, 9000), st.data())
def test_nothing_is_lost_in_exact_arithmetic(strategy: str, name: str, world_size: int, numel: int, data) -> None:
    parts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    parts = parts if numel else [0, 0]
    tensors = dyadic(world_size, numel)
    residuals = dyadic(world_size, numel, seed=1)
    before = np.sum(residuals, axis=0, dtype=np.float64)
    applied = reduce_all(wire(name), tensors, residuals, 2, strategy=strategy, parts=parts, block_numel=2000)
    total = before + 2 * np.sum(tensors, axis=0, dtype=np.float64)
    np.testing.assert_array_equal(np.sum(applied + residuals, axis=0, dtype=np.float64), total)


@pytest.mark.parametrize("options", [{"servers": 1}, {"servers": 2, "partitions": 7}, {"partitions": 9}])
def test_dedicated_and_many_aggregators_conserve_the_sum(options: dict[str, int]) -> None:
    tensors, residuals = dyadic(5, 12345), dyadic(5, 12345, seed=2)
    total = np.sum(tensors + residuals, axis=0, dtype=np.float64)
    applied = reduce_all(wire("topk(density=0.25)"), tensors, residuals, strategy="parameter_server", **options)
    np.testing.assert_array_equal(np.sum(applied + residuals, axis=0, dtype=np.float64), total)


@pytest.mark.parametrize("strategy", ["ring", "parameter_server", "all_gather"])
@pytest.mark.parametrize("name", ["onebit", "terngrad", "fp16", "topk(density=0.25)", "blocks"])
def test_feedback_that_is_put_off_gives_the_same_bits(name: str, strategy: str) -> None:
    rng = np.random.default_rng(1)
    tensors = [rng.standard_normal(7000, np.float32) for _ in range(3)]
    plain = [np.zeros(7000, np.float32) for _ in tensors]
    later = [DeferredResidual(np.zeros(7000, np.float32)) for _ in tensors]
    compiled(name)
    options = {"strategy": strategy, "parts": [0, 5000, 5003, 7000]}
    now, late = (reduce_all(lambda rank: wire(name, rank), tensors, kept, 4, **options) for kept in (plain, later))
    assert [one.tobytes() for one in now] == [one.tobytes() for one in late]
    for kept, deferred in zip(plain, later, strict=True):
        still_to_be_taken_off = deferred.memory.tobytes() != kept.tobytes()
        assert still_to_be_taken_off == compiled(name).kernels.defers
        assert deferred.values().tobytes() == kept.tobytes()


def test_equal_layers_share_a_program_and_each_keeps_what_it_has_put_off() -> None:
    """Binding a program to other memory settles what was put off there; memory that comes again is bound already."""
    layers = 3
    compiled("onebit")

    def rank(transport: MemoryTransport) -> list[int]:
        communicator, codec = Communicator(transport, TIMEOUT_SECONDS), wire("onebit", transport.rank)
        data = [np.ones(5000, np.float32) for _ in range(layers)]
        kept = [DeferredResidual(np.zeros(5000, np.float32)) for _ in range(layers)]
        for _ in range(3):
            for values, residual in zip(data, kept, strict=True):
                communicator.all_reduce(values, codec=codec, residual=residual)
        return [residual.generation for residual in kept]

    assert run_ranks(2, rank) == [[1] * layers] * 2


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        *((strategy, "onebit") for strategy in coded_names()),
        *(("gtopk", "sparse(density=0.1)"), ("ring", "graddrop"), ("ring", "blocks")),
    ],
)
@pytest.mark.parametrize(("world_size", "put_off"), [(5, False), (5, True), (4, True)])
def test_a_scale_is_what_multiplying_first_would_be(strategy: str, codec: str, world_size: int, put_off: bool) -> None:
    numel = 20_000
    tensors = [np.random.default_rng(rank).standard_normal(numel, np.float32) for rank in range(world_size)]
    scaled = [one * np.float32(1 / world_size) for one in tensors]
    options = {"strategy": strategy, "parts": [0, 9000, 9010, numel], "block_numel": 3000}
    make = make_codec if strategy == "gtopk" else wire
    found = []
    for values, scale in ((scaled, 1.0), (tensors, 1 / world_size)):
        kept = [np.zeros(numel, np.float32) for _ in tensors]
        applied = reduce_all(
            lambda rank: make(codec),
            values,
            [*map(DeferredResidual, kept)] if put_off else kept,
            3,
            scale=scale,
            **options,
        )
        found.append([one.tobytes() for one in applied])
    assert found[0] == found[1]


def test_a_scale_is_refused_where_nothing_can_take_it() -> None:
    communicator = Communicator(Fabric(1).transport(0), TIMEOUT_SECONDS)
    with pytest.raises(StrategyError, match="a scale without a codec; pass the codec"):
        communicator.all_reduce(np.ones(4, np.float32), scale=0.5)
    with pytest.raises(StrategyError, match="ring: a scale for elements of float16; wanted float32"):
        communicator.all_reduce(np.ones(4, np.float16), codec=wire("onebit"), scale=0.5)


def test_programs_that_take_turns_on_one_residual_settle_what_the_other_put_off() -> None:
    tensors = dyadic(2, 6000)
    plain, later = (
        [np.zeros(6000, np.float32) for _ in tensors],
        [DeferredResidual(np.zeros(6000, np.float32)) for _ in tensors],
    )

    def rank(transport: MemoryTransport) -> bool:
        communicator, same = Communicator(transport, TIMEOUT_SECONDS), True
        codecs = wire("onebit"), wire("onebit")
        for strategy in ("ring", "parameter_server", "ring", "all_gather", "ring"):
            found = [tensors[transport.rank].copy() for _ in codecs]
            for data, codec, kept in zip(found, codecs, (plain, later), strict=True):
                communicator.all_reduce(data, strategy, codec, kept[transport.rank], partitions=len(strategy))
            same &= found[0].tobytes() == found[1].tobytes()
        return same

    assert run_ranks(2, rank) == [True, True]
    assert [one.values().tobytes() for one in later] == [one.tobytes() for one in plain]


@pytest.mark.parametrize("strategy", ["ring", "parameter_server", "all_gather", "halving_doubling", "hierarchical"])
@pytest.mark.parametrize("name", ["graddrop(density=0.05)", "adacomp", "3lc"])
def test_only_what_was_encoded_travels(name: str, strategy: str) -> None:
    """The same bits as when everything that was reserved travels, in fewer bytes."""
    numel, steps = 40_000, 3
    tensors = [np.random.default_rng(rank).standard_normal(numel, np.float32) for rank in range(4)]
    compiled(name)
    found = []
    for shorter in (True, False):
        sent, applied = [0] * 4, []

        def rank(transport: MemoryTransport, sent=sent, shorter=shorter) -> list[bytes]:
            counting = Counting(transport, sent, shorter)
            communicator, codec = Communicator(counting, TIMEOUT_SECONDS), wire(name)
            residual, results = np.zeros(numel, np.float32), []
            for _ in range(steps):
                data = tensors[transport.rank].copy()
                options = {"parts": [0, 30_000, 30_100, numel], "block_numel": 8000, "ranks_per_node": 2}
                communicator.all_reduce(data, strategy, codec, residual, **options)
                results.append(data.tobytes())
            return [*results, residual.tobytes()]

        applied = run_ranks(4, rank)
        found.append((applied, sum(sent)))
    assert found[0][0] == found[1][0]
    assert found[0][1] < found[1][1]
    if name.startswith("graddrop") and strategy in ("ring", "parameter_server", "all_gather"):  # a block a message
        assert found[0][1] < 0.3 * found[1][1]


class Counting:
    """A transport that counts what it sends, and may insist on whole messages."""

    def __init__(self, inner: MemoryTransport, sent: list[int], shorter: bool) -> None:
        self.inner, self.sent, self.takes_shorter = inner, sent, shorter
        self.rank, self.world_size = inner.rank, inner.world_size
        self.irecv, self.native = inner.irecv, inner.native

    def isend(self, view, peer: int, tag: int):
        self.sent[self.rank] += view.size
        return self.inner.isend(view, peer, tag)


def test_without_a_residual_what_is_not_sent_is_gone() -> None:
    tensors = [np.full(4, 1.0 + 2.0**-20, np.float32) for _ in range(2)]
    assert reduce_all(Halves(), tensors, None)[0].tolist() == [2.0] * 4


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_tensor_that_is_not_contiguous_is_reduced_in_place(dtype: type) -> None:
    wide = [np.full((40, 2), 3, dtype) for _ in range(2)]
    run_ranks(
        2,
        lambda t: Communicator(t, TIMEOUT_SECONDS).all_reduce(wide[t.rank][:, 0], codec=wire("fp16")),
    )
    for one in wide:
        assert one[:, 0].tolist() == [6.0] * 40
        assert one[:, 1].tolist() == [3.0] * 40


def test_an_element_type_that_no_codec_takes_is_refused_before_data_move() -> None:
    with pytest.raises(StrategyError, match=r"ring: elements of float64 with halves; wanted float32$"):
        Communicator(Fabric(1).transport(0)).all_reduce(np.ones(4), codec=Halves())


def test_a_residual_that_does_not_fit_is_refused() -> None:
    communicator = Communicator(Fabric(1).transport(0))
    with pytest.raises(StrategyError, match="a residual of 3 elements of float32; wanted 4 of float32"):
        communicator.all_reduce(np.ones(4, np.float32), codec=Halves(), residual=np.zeros(3, np.float32))
    with pytest.raises(StrategyError, match="a residual of 4 elements of float64; wanted 4 of float32"):
        communicator.all_reduce(np.ones(4, np.float32), codec=Halves(), residual=np.zeros(4))
    with pytest.raises(StrategyError, match="a residual without a codec"):
        communicator.all_reduce(np.ones(4, np.float32), residual=np.zeros(4, np.float32))


@pytest.mark.parametrize("parts", [[0, 3], [1, 4], [0, 3, 2, 4], [0]])
def test_parts_that_do_not_cover_the_tensor_are_refused(parts: list[int]) -> None:
    with pytest.raises(StrategyError, match="parts"):
        Communicator(Fabric(1).transport(0)).all_reduce(np.ones(4, np.float32), codec=Halves(), parts=parts)


def test_ranks_with_different_codecs_are_told() -> None:
    names = ["onebit", "fp16"]
    found = outcomes(
        2,
        lambda t: Communicator(t, TIMEOUT_SECONDS).all_reduce(np.ones(4, np.float32), codec=wire(names[t.rank])),
    )
    assert all(isinstance(one, MismatchError) and "codec is 'fp16()' on rank 1" in str(one) for one in found)


def test_ranks_whose_codec_has_another_text_under_the_same_name_are_told_before_data_move(tmp_path) -> None:
    texts = [(ALGORITHMS / "signsgd.cll").read_text()] * 2
    texts[1] = texts[1].replace("up ? 1 : -1", "up ? 2 : -2")
    codecs = []
    for rank, text in enumerate(texts):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "mine.cll").write_text(text)
        codecs.append(make_codec(str(tmp_path / str(rank) / "mine.cll")))
    assert codecs[0].name == codecs[1].name
    data = [np.ones(4, np.float32) for _ in codecs]
    found = outcomes(2, lambda t: Communicator(t, TIMEOUT_SECONDS).all_reduce(data[t.rank], codec=codecs[t.rank]))
    for one in found:
        assert isinstance(one, MismatchError)
        assert str(one).startswith("the text of codec mine() (fingerprint) is ")
        assert str(one).endswith(
            "; give all hosts the same .cll file, operators and penstock, or the same Python class and settings"
        )
    assert np.array_equal(data, np.ones((2, 4)))


@settings(deadline=None, max_examples=12)
@given(st.sampled_from(sorted(coded_names())), st.integers(1, 6), st.sampled_from([None, 1, 3, 8]), st.randoms())
def test_the_result_does_not_depend_on_how_tensors_are_bucketed(strategy, world_size, partitions, random) -> None:
    """Partition, then compress, then batch: a codec sees the same values in any bucket."""
    sizes = [random.choice([1, 7, 64, 3000, 9000]) for _ in range(5)]
    bounds = [0, *np.cumsum(sizes).tolist()]
    tensors = [np.random.default_rng(rank).normal(0, 1, bounds[-1]).astype(np.float32) for rank in range(world_size)]
    options = {"strategy": strategy} | ({"partitions": partitions} if partitions else {})

    def exchanged(cuts: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """All-reduce tensors cuts[i] to cuts[i + 1] together, for each i."""
        residuals = [np.zeros(bounds[-1], np.float32) for _ in range(world_size)]
        applied = []
        for low, high in pairwise(cuts):
            start, stop = bounds[low], bounds[high]
            parts = [bound - start for bound in bounds[low : high + 1]]
            own = [tensor[start:stop] for tensor in tensors]
            kept = [residual[start:stop] for residual in residuals]
            applied += reduce_all(
                wire("onebit"), own, kept, parts=parts, block_numel=random.choice([500, 1 << 20]), **options
            )
        return np.concatenate(applied), residuals

    together, kept_together = exchanged([0, 5])
    apart, kept_apart = exchanged(sorted({0, 5, *random.sample(range(1, 5), 2)}))
    np.testing.assert_array_equal(together, apart)
    np.testing.assert_array_equal(kept_together, kept_apart)


def test_ranks_of_one_node_share_the_first_ones_residual() -> None:
    tensors, residuals = dyadic(6, 4000), [np.zeros(4000, np.float32) for _ in range(6)]
    total = np.sum(tensors, axis=0, dtype=np.float64)
    applied = reduce_all(wire("topk(density=0.25)"), tensors, residuals, strategy="hierarchical", ranks_per_node=3)
    np.testing.assert_array_equal(np.sum(applied + residuals, axis=0, dtype=np.float64), total)
    assert [bool(residual.any()) for residual in residuals] == [True, False, False, True, False, False]


@pytest.mark.parametrize("strategy", ["ring", "parameter_server", "all_gather"])
def test_a_rank_that_dies_in_the_middle_ends_all_others_with_an_error(strategy: str) -> None:
    fabric = Fabric(4)
    threads = set(threading.enumerate())

    class Dying(Halves):
        """A codec whose rank is gone when it encodes its third block."""

        _calls = 0

        def __init__(self, rank: int) -> None:
            self._rank = rank

        def encode(self, read: np.ndarray, residual: np.ndarray | None, out: np.ndarray) -> int:
            self._calls += 1
            if self._rank == 2 and self._calls == 3:
                fabric.kill(2)
                raise SystemExit
            return super().encode(read, residual, out)

    def rank(transport: MemoryTransport) -> None:
        data, residual = np.ones(40_000, np.float32), np.zeros(40_000, np.float32)
        communicator, codec = Communicator(transport, TIMEOUT_SECONDS), Dying(transport.rank)
        try:
            with contextlib.suppress(SystemExit):
                communicator.all_reduce(data, strategy, codec, residual, block_numel=2000, partitions=20)
        finally:
            fabric.kill(transport.rank)  # a process that ends closes its connections, also after an error

    found = outcomes(4, rank, fabric)
    assert set(threading.enumerate()) <= threads
    assert found[2] is None
    for other in (0, 1, 3):
        assert isinstance(found[other], TransportError)
        assert str(found[other]).startswith(f"{strategy}: rank {other}, step ")


@pytest.mark.parametrize("strategy", ["ring", "parameter_server", "all_gather"])
def test_not_a_number_on_one_rank_is_raised_on_all_of_them(strategy: str) -> None:
    def rank(transport: MemoryTransport) -> tuple[str, np.ndarray, str]:
        communicator, codec = Communicator(transport, TIMEOUT_SECONDS), make_codec("onebit")
        data = np.ones(9000, np.float32)
        data[5000] = np.nan if transport.rank == 1 else 1.0
        with pytest.raises(NonFiniteError) as caught:
            communicator.all_reduce(data, strategy, codec, np.zeros(9000, np.float32))
        again = np.ones(100, np.float32)
        communicator.all_reduce(again, strategy, codec)  # the communicator and the codec are of use again
        return str(caught.value), data, again.tolist()[0]

    found = run_ranks(3, rank)
    assert any("the gradient holds NaN or infinity; fix the loss" in message for message, _, _ in found)
    for _, data, again in found:
        assert np.isnan(data[5000])
        assert data.tobytes() == found[0][1].tobytes()
        assert again == 3.0


def test_a_step_that_is_to_be_skipped_leaves_not_a_number_everywhere_and_raises_nothing() -> None:
    tensors = [np.ones(50, np.float32) for _ in range(3)]
    tensors[2][7] = np.inf
    codec = lambda rank: make_codec("onebit", on_nonfinite="skip")  # noqa: E731
    assert np.isnan(reduce_all(codec, tensors, [np.zeros(50, np.float32) for _ in tensors])[0]).all()


@pytest.mark.parametrize("strategy", ["ring", "parameter_server", "all_gather"])
def test_a_block_is_encoded_while_another_is_on_its_way(strategy: str) -> None:
    program, _ = build_compressed(strategy, 3, [0, 90_000], Options(partitions=9, block_numel=10_000))
    for instructions in program.ranks:
        flying: set[int] = set()
        hidden = 0
        for do, index in schedule(instructions, choose_window(program, WINDOW)):
            if do is Do.SEND:
                flying.add(index)
            elif do is Do.WAIT:
                flying.discard(index)
            elif instructions[index].op is Op.ENCODE and flying:
                hidden += 1
        assert hidden >= 6  # of nine


@pytest.mark.parametrize("kind", [np.asarray, DeferredResidual])
def test_nothing_is_allocated_after_the_first_compressed_calls(kind) -> None:
    numel = 1 << 18
    tensors, residuals = dyadic(2, numel), [kind(np.zeros(numel, np.float32)) for _ in range(2)]
    codec = wire("onebit")

    def rank(transport: MemoryTransport) -> Communicator:
        communicator = Communicator(transport, TIMEOUT_SECONDS)
        for _ in range(2):  # the second loads the kernel that takes off what the first put off
            communicator.all_reduce(tensors[transport.rank], codec=codec, residual=residuals[transport.rank])
        return communicator

    communicators = run_ranks(2, rank)
    gc.collect()
    tracemalloc.start()
    again = [
        threading.Thread(target=c.all_reduce, args=(tensors[rank], "ring", codec, residuals[rank]))
        for rank, c in enumerate(communicators)
    ]
    for thread in again:
        thread.start()
    for thread in again:
        thread.join()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 1024  # a chunk is 512 KB, its payload 16 KB
