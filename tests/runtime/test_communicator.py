"""Every strategy over the memory engine, against a float64 oracle; what a communicator keeps and refuses."""

import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from every_call import dense_calls
from penstock.errors import MismatchError, PenstockError, StrategyError, TransportError
from penstock.network import Network
from penstock.program import Collective, Slice
from penstock.program.builder import ProgramBuilder
from penstock.runtime import Communicator
from penstock.runtime.recorder import Recorder
from penstock.runtime.transport.memory import Fabric, MemoryTransport
from penstock.runtime.views import DTYPES
from penstock.strategies.linear_pipeline import best_block_nbytes
from runtime.oracle import check, random_tensors
from runtime.programs import Halves, coded_exchange, exchange, ring
from runtime.threads import outcomes, run_ranks

TIMEOUT_SECONDS = 120.0  # nothing takes so long, however busy the machine


def call(communicator: Communicator, operation: str, strategy: str, tensor: Any, root: int, **options: Any) -> None:
    where = {"root": root} if operation in ("broadcast", "reduce") else {}
    getattr(communicator, operation)(tensor, strategy=strategy, **where, **options)


@settings(max_examples=150)
@given(
    st.sampled_from(sorted(dense_calls())),
    st.integers(1, 9),
    st.integers(0, 200),
    st.sampled_from(sorted(set(DTYPES) - {"bfloat16"})),
    st.integers(0, 8),
    st.sampled_from([None, 1, 3, 7, 64]),
)
def test_every_strategy_does_what_its_collective_promises(
    which: tuple[str, str], world_size: int, numel: int, dtype: str, root: int, block_numel: int | None
) -> None:
    operation, strategy = which
    root %= world_size
    inputs = random_tensors(world_size, numel, dtype)
    outputs = [tensor.copy() for tensor in inputs]

    def rank(transport: MemoryTransport) -> None:
        communicator = Communicator(transport, TIMEOUT_SECONDS)
        call(communicator, operation, strategy, outputs[transport.rank], root, block_numel=block_numel)

    run_ranks(world_size, rank)
    check(operation, inputs, outputs, dtype, root)


@pytest.mark.parametrize(("operation", "strategy"), sorted(dense_calls()))
def test_every_strategy_reduces_bfloat16_tensors(operation: str, strategy: str) -> None:
    torch = pytest.importorskip("torch")
    inputs = random_tensors(3, 1000, "bfloat16")
    outputs = [tensor.copy() for tensor in inputs]

    def rank(transport: MemoryTransport) -> None:
        tensor = torch.from_numpy(outputs[transport.rank]).view(torch.bfloat16)
        call(Communicator(transport, TIMEOUT_SECONDS), operation, strategy, tensor, 1, block_numel=100)

    run_ranks(3, rank)
    check(operation, inputs, outputs, "bfloat16", root=1)


def test_a_large_ring_in_blocks_is_right_many_times_in_a_row() -> None:
    inputs = random_tensors(4, 300_001, "float32")
    outputs = [tensor.copy() for tensor in inputs]

    def rank(transport: MemoryTransport) -> None:
        communicator = Communicator(transport, TIMEOUT_SECONDS)
        for _ in range(5):
            np.copyto(outputs[transport.rank], inputs[transport.rank])
            communicator.all_reduce(outputs[transport.rank], block_numel=20_000)

    run_ranks(4, rank)
    check("all_reduce", inputs, outputs, "float32", 0)


def test_tensors_that_are_not_contiguous_are_reduced_where_they_are() -> None:
    torch = pytest.importorskip("torch")
    arrays = [np.ones((4, 6)) for _ in range(2)]
    tensors = [torch.ones(4, 6, requires_grad=True) for _ in range(2)]

    def rank(transport: MemoryTransport) -> None:
        communicator = Communicator(transport, TIMEOUT_SECONDS)
        communicator.all_reduce(arrays[transport.rank][:, ::2])
        communicator.all_reduce(tensors[transport.rank].t())

    run_ranks(2, rank)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert array.tolist() == [[2.0, 1.0] * 3] * 4
        assert tensor.tolist() == [[2.0] * 6] * 4


def test_the_second_call_of_a_kind_uses_the_first_ones_program() -> None:
    def rank(transport: MemoryTransport) -> list[int]:
        communicator = Communicator(transport, TIMEOUT_SECONDS)
        sizes = []
        for numel in (5, 5, 6, 5):
            communicator.all_reduce(np.ones(numel))
            sizes.append(len(communicator._prepared))
        return sizes

    assert run_ranks(2, rank) == [[1, 1, 2, 2]] * 2


def test_a_rank_with_one_codec_for_all_calls_meets_one_with_a_codec_for_each() -> None:
    """As ranks on a device meet hosts: they keep different programs, and compare them at the same calls."""

    def rank(transport: MemoryTransport) -> np.ndarray:
        communicator, one = Communicator(transport, TIMEOUT_SECONDS), Halves()
        values = np.ones(12, np.float32)
        for codec in (one, one if transport.rank == 0 else Halves()):
            communicator.all_reduce(values, codec=codec)
        return values

    for found in run_ranks(2, rank):
        np.testing.assert_array_equal(found, np.full(12, 4.0))


def test_any_program_can_be_run_also_through_a_codec() -> None:
    tensors = random_tensors(2, 50, "float32")
    wanted = sum(tensor.astype(np.float16).astype(np.float32) for tensor in tensors)
    program = coded_exchange(50)
    run_ranks(2, lambda t: Communicator(t, TIMEOUT_SECONDS).run(program, tensors[t.rank], Halves()))
    for tensor in tensors:
        np.testing.assert_array_equal(tensor, wanted)


def disagree(*calls: Any) -> list[Any]:
    """Run rank r's call; nothing may have been written to any tensor."""
    tensors = [np.arange(12, dtype=np.float32) for _ in calls]

    def rank(transport: MemoryTransport) -> None:
        calls[transport.rank](Communicator(transport, TIMEOUT_SECONDS), tensors[transport.rank])

    errors = outcomes(len(calls), rank)
    for tensor in tensors:
        assert tensor.tolist() == list(range(12))
    return errors


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda c, x: c.all_reduce(x[:11]), "numel is 11 on rank 2 and 12 on rank 0"),
        (lambda c, x: c.all_reduce(x.view(np.int32)), "dtype is 'int32' on rank 2 and 'float32' on rank 0"),
        (
            lambda c, x: c.all_reduce(x, strategy="linear_pipeline"),
            "strategy is 'linear_pipeline' on rank 2 and 'ring' on rank 0",
        ),
        (lambda c, x: c.broadcast(x), "collective is 'broadcast' on rank 2 and 'all_reduce' on rank 0"),
        (lambda c, x: c.all_reduce(x, block_numel=1), "options \\(digest\\) is '[0-9a-f]+' on rank 2"),
    ],
)
def test_ranks_that_disagree_are_told_before_data_moves(other: Any, message: str) -> None:
    same = lambda c, x: c.all_reduce(x)  # noqa: E731
    for error in disagree(same, same, other):
        assert isinstance(error, MismatchError)
        with pytest.raises(MismatchError, match=message):
            raise error
        assert "all ranks must make the same call" in str(error)


def test_a_program_for_another_world_is_told_to_all() -> None:
    errors = disagree(
        lambda c, x: c.run(ring(3, 12), x), lambda c, x: c.run(ring(4, 12), x), lambda c, x: c.run(ring(3, 12), x)
    )
    assert isinstance(errors[1], StrategyError)
    for rank in (0, 2):
        assert isinstance(errors[rank], MismatchError)
        assert "rank 1 cannot take part: hand-made ring: program for 4 ranks on 3" in str(errors[rank])


def test_a_rank_that_cannot_build_its_program_tells_the_others() -> None:
    good = lambda c, x: c.all_reduce(x)  # noqa: E731
    errors = disagree(good, good, lambda c, x: c.all_reduce(x, strategy="rign"))
    assert isinstance(errors[2], StrategyError)
    assert "rank 2 cannot take part: no strategy 'rign'" in str(errors[0])


def test_an_impossible_option_is_told_to_all() -> None:
    good = lambda c, x: c.all_reduce(x)  # noqa: E731
    errors = disagree(good, lambda c, x: c.all_reduce(x, block_numel=0))
    assert "rank 1 cannot take part: block_numel is 0; wanted >= 1" in str(errors[0])


def test_the_communicator_is_still_good_after_a_mismatch() -> None:
    def rank(transport: MemoryTransport) -> float:
        communicator = Communicator(transport, TIMEOUT_SECONDS)
        with pytest.raises(MismatchError):
            communicator.all_reduce(np.ones(3 + transport.rank))
        tensor = np.ones(3)
        communicator.all_reduce(tensor)
        return float(tensor[0])

    assert run_ranks(2, rank) == [2.0, 2.0]


def test_a_rank_that_does_not_join_is_named_by_all() -> None:
    together = threading.Barrier(3)

    def rank(transport: MemoryTransport) -> None:
        if transport.rank != 2:
            together.wait(60)
            Communicator(transport, timeout_seconds=2.5).all_reduce(np.ones(4))

    errors = outcomes(4, rank)
    for waiting in (0, 1, 3):
        assert isinstance(errors[waiting], TransportError)
        assert errors[waiting].peer == 2
        assert "ring: rank" in str(errors[waiting])
        assert "no message exchanged with rank 2: it did not join this call" in str(errors[waiting])


def test_ranks_that_make_different_known_calls_never_exchange_data() -> None:
    """Both kinds were compared before, so nothing is compared now; the tags keep them apart."""

    def rank(transport: MemoryTransport) -> None:
        communicator = Communicator(transport, TIMEOUT_SECONDS)
        for numel in (4, 5):
            communicator.all_reduce(np.ones(numel))
        communicator.timeout_seconds = 0.5
        tensor = np.ones(4 + transport.rank)
        try:
            communicator.all_reduce(tensor)
        finally:
            assert tensor.tolist() == [1.0] * tensor.size

    assert all(isinstance(error, TransportError) for error in outcomes(2, rank))


def test_a_failed_communicator_says_so_when_it_is_used_again() -> None:
    communicator = Communicator(Fabric(2).transport(0), timeout_seconds=0.05)
    with pytest.raises(TransportError):
        communicator.all_reduce(np.ones(4))
    with pytest.raises(PenstockError, match=r"this communicator failed before .*; make a new one"):
        communicator.all_reduce(np.ones(4))


def test_a_measured_network_gives_pipelines_their_best_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(64)))  # a core for everybody
    network = Network(workers=3, alpha_seconds=1e-4, beta_seconds_per_byte=1e-9, gamma_seconds_per_byte=0.0)
    numel = 1_000_000
    wanted = round(best_block_nbytes(network, 3, 4 * numel, Collective.BROADCAST) / 4)

    def rank(transport: MemoryTransport) -> tuple[int, int]:
        communicator = Communicator(transport, TIMEOUT_SECONDS, network=network)
        sizes = []
        for options in ({}, {"block_numel": 400_000}):
            communicator.broadcast(np.ones(numel, np.float32), **options)
            program = next(reversed(communicator._prepared.values())).part
            sizes.append(max((one.read or one.write).numel for one in program.instructions))
        return sizes[0], sizes[1]

    for chosen, asked in run_ranks(3, rank):
        assert wanted * 0.9 < chosen <= wanted  # blocks are as even as possible
        assert 300_000 < asked <= 400_000


def test_a_codec_that_fails_in_the_middle_ends_the_communicator() -> None:
    class Broken(Halves):
        def encode(self, read: np.ndarray, residual: np.ndarray | None, out: np.ndarray) -> int:
            raise ZeroDivisionError("a bug")

    communicator = Communicator(Fabric(1).transport(0))
    builder = ProgramBuilder("coded", Collective.ALL_REDUCE, 1, 4)
    builder.scratch("code", 4, encoded=True)
    builder.encode(0, Slice("code", 0, 4), Slice("data", 0, 4))
    with pytest.raises(ZeroDivisionError):
        communicator.run(builder.build(), np.ones(4, np.float32), Broken())
    with pytest.raises(PenstockError, match=r"failed before \(a bug\)"):
        communicator.all_reduce(np.ones(4))


def test_exchange_is_not_confused_with_another_program_of_the_same_size() -> None:
    first, second = exchange(6), ring(2, 6)

    def rank(transport: MemoryTransport) -> list[float]:
        communicator = Communicator(transport, TIMEOUT_SECONDS)
        tensor = np.ones(6)
        for program in (first, second, first):
            communicator.run(program, tensor)
        return tensor.tolist()

    assert run_ranks(2, rank) == [[8.0] * 6] * 2


@pytest.mark.slow
def test_sixty_four_ranks_of_one_process_get_ready_and_run_ten_buckets() -> None:
    """`benchmarks/preparing.py` says how long it takes; each rank holds its own part, 315 instructions of a ring."""

    def rank(transport: MemoryTransport) -> int:
        communicator = Communicator(transport, TIMEOUT_SECONDS)
        for bucket in range(10):
            values = np.ones(65_536 + bucket, np.float32)
            communicator.all_reduce(values)
            assert (values == 64).all()
        return max(len(prepared.part.instructions) for prepared in communicator._prepared.values())

    assert run_ranks(64, rank) == [63 * 5] * 64


def test_lanes_share_the_network_the_recorder_and_failures_but_not_their_calls() -> None:
    def rank(transport: MemoryTransport) -> tuple[bool, bool, int, int]:
        one = Communicator(transport, timeout_seconds=60)
        other = one.lanes(2)[1]
        one.network, one.recorder = Network(2, 1e-5, 1e-9, 1e-10), Recorder()
        values = np.ones(100, np.float32)
        other.all_reduce(values)
        return other.network is one.network, other.recorder is one.recorder, int(values[0]), one._calls

    assert run_ranks(2, rank) == [(True, True, 2, 0)] * 2
