"""Programs in rounds: every strategy, checked by an interpreter that runs one round of all ranks after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from every_call import dense_calls
from penstock.errors import StrategyError
from penstock.program import DATA, Collective, Op, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.runtime.device.rounds import Round, rounds
from penstock.strategies import Options, build
from runtime.oracle import check, random_tensors
from runtime.programs import exchange, ring

OURS = sorted(which for which in dense_calls() if which[1] != "native")


def play(program: Program, data: list[np.ndarray]) -> None:
    """Run rounds as NCCL would: each rank's groups in order, a group when all its messages have their other end."""
    plans = [list(plan) for plan in rounds(program)]
    scratch = [{b.name: np.full(b.numel, 99, data[0].dtype) for b in program.buffers} for _ in program.ranks]
    memory = [{DATA: tensor, **buffers} for tensor, buffers in zip(data, scratch, strict=True)]

    def view(rank: int, slice_: Slice) -> np.ndarray:
        return memory[rank][slice_.buffer][slice_.start : slice_.stop]

    while any(plans):
        fronts = {rank: plan[0] for rank, plan in enumerate(plans) if plan}
        sends = {
            (rank, program.ranks[rank][i].peer): view(rank, program.ranks[rank][i].read).copy()
            for rank, front in fronts.items()
            for i in front.messages
            if program.ranks[rank][i].op is Op.SEND
        }
        wanted = {
            (program.ranks[rank][i].peer, rank): view(rank, program.ranks[rank][i].write)
            for rank, front in fronts.items()
            for i in front.messages
            if program.ranks[rank][i].op is Op.RECV
        }
        waiting = {source for source, _ in set(sends) - set(wanted)} | {
            target for _, target in set(wanted) - set(sends)
        }
        both = set(sends) & set(wanted)
        while more := {rank for pair in both if waiting & set(pair) for rank in pair} - waiting:
            waiting |= more  # whoever shares a group with a message that cannot move
        moved = set(fronts) - waiting
        assert moved, "groups wait in a circle"
        for (source, target), place in wanted.items():
            if target in moved:
                place[:] = sends[source, target]
        for rank in moved:
            for i in plans[rank].pop(0).computations:
                instruction = program.ranks[rank][i]
                out, other = view(rank, instruction.write), view(rank, instruction.read)
                out[:] = out + other if instruction.op is Op.MERGE else other


@settings(max_examples=150)
@given(st.sampled_from(OURS), st.integers(1, 9), st.integers(0, 60), st.sampled_from([None, 1, 3, 64]))
def test_every_strategy_in_rounds_does_what_its_collective_promises(
    which: tuple[str, str], world_size: int, numel: int, block: int | None
) -> None:
    program = build(*which, world_size, numel, Options(block_numel=block, root=world_size - 1))
    inputs = random_tensors(world_size, numel, "float32")
    outputs = [tensor.copy() for tensor in inputs]
    play(program, outputs)
    check(which[0], inputs, outputs, "float32", world_size - 1)


def test_a_ring_takes_as_many_rounds_as_steps() -> None:
    for plan in rounds(ring(5, 20)):
        assert [len(one.messages) for one in plan] == [2] * 8
        assert [len(one.computations) for one in plan] == [1] * 4 + [0] * 4


def test_messages_between_two_ranks_in_both_directions_are_one_group() -> None:
    assert rounds(exchange(4)) == ((Round((0, 1), (2,)),), (Round((0, 1), (2,)),))


def test_a_program_that_waits_in_a_circle_is_refused() -> None:
    builder = ProgramBuilder("circle", Collective.ALL_REDUCE, 2, 2)
    for rank in range(2):
        builder.recv(rank, 1 - rank, Slice(DATA, 0, 2))
        builder.send(rank, 1 - rank, Slice(DATA, 0, 2))
    with pytest.raises(StrategyError, match="circle: rank 0 never gets past instruction 0: recv"):
        rounds(builder.build())
