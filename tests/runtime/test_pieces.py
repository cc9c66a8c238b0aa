"""Pieces of a tensor that is elsewhere: fetched before they are used, brought back when they are final."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from every_call import dense_calls
from penstock.program import Program
from penstock.runtime import pieces as module
from penstock.runtime.executor import Prepared, prepare
from penstock.runtime.pieces import Pieces, cut
from penstock.runtime.schedule import Action, schedule
from penstock.runtime.transport.memory import MemoryTransport
from penstock.strategies import Options, build
from runtime.oracle import check, random_tensors
from runtime.programs import ring
from runtime.threads import run_ranks

OURS = sorted(dense_calls())


class LazyStage:
    """A device as slow as allowed: a piece comes at the last moment and leaves at the first."""

    def __init__(self, device: np.ndarray) -> None:
        self.device = device
        self.host = np.full_like(device, 77)

    def walk(self, pieces: Pieces, actions: Sequence[Action]) -> Iterator[Action]:
        for position, action in enumerate(actions):
            for start, stop in (pieces.bounds[piece] for piece in pieces.needed.get(position, ())):
                self.host[start:stop] = self.device[start:stop]
            yield action
            for start, stop in (pieces.bounds[piece] for piece in pieces.finished.get(position, ())):
                self.device[start:stop] = self.host[start:stop]


@settings(max_examples=100)
@given(
    st.sampled_from(OURS),
    st.integers(1, 7),
    st.integers(0, 60),
    st.sampled_from([None, 1, 3, 64]),
    st.integers(1, 20),
)
def test_a_program_on_pieces_gives_what_it_gives_on_the_whole(
    which: tuple[str, str], world_size: int, numel: int, block: int | None, least: int
) -> None:
    program = build(*which, world_size, numel, Options(block_numel=block, root=world_size - 1))
    inputs = random_tensors(world_size, numel, "float32")
    stages = [LazyStage(tensor.copy()) for tensor in inputs]

    def rank(transport: MemoryTransport) -> None:
        prepared, stage = prepare(program, transport, "float32"), stages[transport.rank]
        prepared._pieces = cut(program.ranks[transport.rank], prepared.actions, least)
        prepared.run(stage.host, staged=stage)

    run_ranks(world_size, rank)
    check(which[0], inputs, [stage.device for stage in stages], "float32", world_size - 1)


def pieces_of(program: Program, rank: int, least: int) -> Pieces:
    return cut(program.ranks[rank], schedule(program.ranks[rank], 4), least)


def test_a_ring_fetches_what_it_sends_first_first() -> None:
    for rank in range(4):
        pieces = pieces_of(ring(4, 400), rank, 1)
        assert pieces.bounds[0] == (100 * rank, 100 * rank + 100)
        assert sorted(pieces.bounds) == [(0, 100), (100, 200), (200, 300), (300, 400)]
        assert 0 in pieces.needed[min(pieces.needed)]


def test_small_pieces_are_joined() -> None:
    assert pieces_of(ring(4, 400), 0, 150).bounds == ((0, 200), (200, 400))
    assert pieces_of(ring(4, 400), 0, module.LEAST_NUMEL).bounds == ((0, 400),)


def test_a_piece_goes_back_once_and_only_where_it_was_written() -> None:
    program = build("broadcast", "linear_pipeline", 3, 100, Options(block_numel=10))
    root, last = pieces_of(program, 0, 1), pieces_of(program, 2, 1)
    assert root.finished == {}
    assert sorted(piece for gone in last.finished.values() for piece in gone) == list(range(10))


def test_a_program_that_touches_nothing_fetches_nothing() -> None:
    assert pieces_of(build("all_reduce", "ring", 1, 100), 0, 1) == Pieces((), {}, {})


def test_pieces_are_cut_once_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = []
    monkeypatch.setattr("penstock.runtime.executor.cut", lambda *given: cuts.append(given) or cut(*given))

    def rank(transport: MemoryTransport) -> Prepared:
        prepared, stage = prepare(ring(2, 8), transport, "int32"), LazyStage(np.ones(8, np.int32))
        for call in range(3):
            prepared.run(stage.host, call, staged=stage)
        assert stage.device.tolist() == [8] * 8
        return prepared

    run_ranks(2, rank)
    assert len(cuts) == 2  # one per rank
