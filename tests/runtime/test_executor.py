"""The executor over the memory engine: results, reuse, codecs, and what it refuses."""

import gc
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StrategyError, TransportError
from penstock.program import Collective, Slice
from penstock.program.builder import ProgramBuilder
from penstock.runtime.executor import prepare
from penstock.runtime.transport.memory import Fabric, MemoryTransport
from penstock.runtime.views import DTYPES, Scratch
from runtime.programs import Halves, chain, coded_exchange, data, exchange, ring
from runtime.threads import outcomes, run_ranks


def inputs(world_size: int, numel: int, dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(world_size * 1000 + numel)
    return [rng.normal(0, 5, numel).astype(DTYPES[dtype]) for _ in range(world_size)]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(0, 40),
    st.sampled_from(["float32", "float64", "float16", "int32"]),
    st.integers(1, 4),
)
def test_a_ring_sums_and_all_ranks_hold_the_same_bits(world_size: int, numel: int, dtype: str, window: int) -> None:
    tensors = inputs(world_size, numel, dtype)
    exact = sum(tensor.astype(np.float64) for tensor in tensors)
    size = sum(np.abs(tensor.astype(np.float64)) for tensor in tensors)
    program = ring(world_size, numel)
    run_ranks(world_size, lambda t: prepare(program, t, dtype, window=window).run(tensors[t.rank]))
    assert len({tensor.tobytes() for tensor in tensors}) == 1
    unit = np.finfo(dtype).eps / 2 if dtype != "int32" else 0.0
    assert np.all(np.abs(tensors[0].astype(np.float64) - exact) <= 1.1 * (world_size - 1) * unit * size)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 8), st.integers(1, 4))
def test_a_chain_hands_on_the_roots_data(world_size: int, numel: int, blocks: int, window: int) -> None:
    tensors = inputs(world_size, numel)
    wanted = tensors[0].copy()
    program = chain(world_size, numel, blocks)
    run_ranks(world_size, lambda t: prepare(program, t, "float32", window=window).run(tensors[t.rank]))
    for tensor in tensors:
        np.testing.assert_array_equal(tensor, wanted)


def test_a_prepared_program_runs_again_on_the_same_and_on_other_tensors() -> None:
    program = ring(3, 10)

    def rank(transport: MemoryTransport) -> list[np.ndarray]:
        prepared = prepare(program, transport, "float64")
        same, other = np.full(10, 1.0), np.full(10, 2.0)
        for call, tensor in enumerate([same, same, other, same]):
            prepared.run(tensor, call)
        return [same, other]

    for same, other in run_ranks(3, rank):
        assert same.tolist() == [27.0] * 10
        assert other.tolist() == [6.0] * 10


def test_nothing_is_allocated_after_the_first_call() -> None:
    numel = 1 << 16
    program = ring(2, numel)
    tensors = inputs(2, numel)

    def rank(transport: MemoryTransport) -> tuple[Any, np.ndarray]:
        prepared = prepare(program, transport, "float32")
        prepared.run(tensors[transport.rank])
        return prepared, tensors[transport.rank]

    prepared = run_ranks(2, rank)
    gc.collect()
    tracemalloc.start()
    again = [threading.Thread(target=p.run, args=(tensor, 1)) for p, tensor in prepared]
    for thread in again:
        thread.start()
    for thread in again:
        thread.join()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 1024  # one chunk alone is 128 KB


def test_a_program_that_is_kept_does_not_keep_the_tensor() -> None:
    import weakref

    class Tensor(np.ndarray):
        pass

    def rank(transport: MemoryTransport) -> Any:
        prepared = prepare(exchange(100), transport, "float32")
        tensor = np.zeros(100, np.float32).view(Tensor)
        prepared.run(tensor)
        return prepared, weakref.ref(tensor)

    results = run_ranks(2, rank)
    gc.collect()
    assert all(reference() is None for _, reference in results)


def test_programs_share_one_scratch_and_follow_it_when_it_grows() -> None:
    def rank(transport: MemoryTransport) -> list[np.ndarray]:
        scratch = Scratch()
        small = prepare(exchange(10), transport, "int64", scratch=scratch)
        tensors = [np.ones(10, np.int64), np.ones(10, np.int64), np.ones(1000, np.int64)]
        small.run(tensors[0], 0)
        large = prepare(exchange(1000), transport, "int64", scratch=scratch)
        small.run(tensors[1], 1)
        large.run(tensors[2], 2)
        assert small.scratch.memory is large.scratch.memory
        return tensors

    for tensors in run_ranks(2, rank):
        assert all(np.all(tensor == 2) for tensor in tensors)


@pytest.mark.parametrize("numel", [0, 1, 33])
def test_encoded_messages_go_through_the_codec(numel: int) -> None:
    tensors = inputs(2, numel)
    wanted = sum(tensor.astype(np.float16).astype(np.float32) for tensor in tensors)
    program = coded_exchange(numel)
    run_ranks(2, lambda t: prepare(program, t, "float32", codec=Halves()).run(tensors[t.rank]))
    for tensor in tensors:
        np.testing.assert_array_equal(tensor, wanted)


def test_an_encoded_program_without_codec_is_refused() -> None:
    with pytest.raises(StrategyError, match="coded exchange: buffer 'mine' is encoded; pass the codec"):
        prepare(coded_exchange(4), Fabric(2).transport(0), "float32")


def test_encoded_slices_that_overlap_are_refused() -> None:
    builder = ProgramBuilder("sloppy", Collective.ALL_REDUCE, 1, 4)
    builder.scratch("code", 4, encoded=True)
    builder.encode(0, Slice("code", 0, 4), data(0, 4))
    builder.decode(0, data(0, 2), Slice("code", 0, 2))
    with pytest.raises(StrategyError, match=r"sloppy: encoded code\[0:2\] overlaps code\[0:4\]"):
        prepare(builder.build(), Fabric(1).transport(0), "float32", codec=Halves())


def test_a_slice_beyond_its_buffer_is_refused() -> None:
    builder = ProgramBuilder("greedy", Collective.ALL_REDUCE, 1, 4)
    builder.scratch("small", 2)
    builder.copy(0, Slice("small", 0, 4), data(0, 4))
    with pytest.raises(StrategyError, match=r"greedy: rank 0 uses small\[0:4\]; the buffer has 2 elements"):
        prepare(builder.build(), Fabric(1).transport(0), "float32")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (np.zeros(5, np.float32), "exchange: 5 elements of float32; prepared for 4 of float32"),
        (np.zeros(4, np.float64), "exchange: 4 elements of float64; prepared for 4 of float32"),
        (np.zeros(8, np.float32)[::2], "array is not contiguous and writable"),
        ([1.0], r"found \[1.0\]; wanted a numpy array or a torch tensor"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(tensor: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        prepare(exchange(4), Fabric(2).transport(0), "float32").run(tensor)


def test_a_program_for_other_ranks_is_refused() -> None:
    with pytest.raises(StrategyError, match="exchange: program for 2 ranks on 3; build it for these"):
        prepare(exchange(4), Fabric(3).transport(0), "float32")


def test_a_peer_that_never_comes_is_named_within_the_timeout() -> None:
    def rank(transport: MemoryTransport) -> None:
        if transport.rank != 2:
            prepare(ring(4, 8), transport, "float32").run(np.zeros(8, np.float32), timeout_seconds=0.2)

    errors = outcomes(4, rank)
    assert errors[2] is None
    for waiting in (0, 1, 3):
        assert isinstance(errors[waiting], TransportError)
        assert "hand-made ring: rank" in str(errors[waiting])
    assert errors[3].peer == 2
    assert "rank 3, step 0: recv   incoming[4:6] <- 2: no message exchanged with rank 2: nothing for 0.2 s" in str(
        errors[3]
    )


def test_torch_tensors_of_every_type_are_reduced_in_place() -> None:
    torch = pytest.importorskip("torch")
    for dtype in DTYPES:
        tensors = [torch.arange(10).to(getattr(torch, dtype)) for _ in range(3)]
        run_ranks(3, lambda t, d=dtype, x=tensors: prepare(ring(3, 10), t, d).run(x[t.rank]))
        for tensor in tensors:
            assert tensor.tolist() == [3 * i for i in range(10)], dtype
