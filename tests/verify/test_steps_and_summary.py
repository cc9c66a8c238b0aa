"""What a step is, what is counted, and the bounds that no program can beat."""

from math import ceil, log2

import pytest

from every_call import dense_calls
from penstock.program import DATA, Collective, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.simulator.program import count_steps
from penstock.strategies import Options, build
from penstock.verify import verify
from penstock.verify.summary import least_nic_elements, summarise


def star(world_size: int, outwards: bool) -> Program:
    """Rank 0 exchanges one message with each other rank."""
    collective = Collective.BROADCAST if outwards else Collective.REDUCE
    builder = ProgramBuilder("star", collective, world_size, 2)
    builder.scratch("box", 2 * world_size)
    data = Slice(DATA, 0, 2)
    for rank in range(1, world_size):
        if outwards:
            builder.message(0, rank, data, data)
        else:
            builder.message(rank, 0, data, Slice("box", 2 * rank, 2 * rank + 2))
            builder.merge(0, data, Slice("box", 2 * rank, 2 * rank + 2))
    return builder.build()


@pytest.mark.parametrize("outwards", [False, True])
def test_a_rank_sends_and_receives_one_message_per_step(outwards):
    proof = verify(star(6, outwards))
    assert proof.proved
    assert proof.steps == 5


def test_a_rank_sends_and_receives_in_the_same_step():
    builder = ProgramBuilder("exchange", Collective.ALL_GATHER, 2, 2)
    builder.message(0, 1, Slice(DATA, 0, 1), Slice(DATA, 0, 1))
    builder.message(1, 0, Slice(DATA, 1, 2), Slice(DATA, 1, 2))
    proof = verify(builder.build())
    assert (proof.proved, proof.steps) == (True, 1)


def test_a_native_call_is_one_step_without_messages():
    program = build("all_reduce", "native", 4, 8)
    summary = summarise(program, verify(program).steps)
    assert (summary.steps, summary.messages, summary.bytes_per_link, summary.bytes_per_nic) == (1, 0, 0, 0)


def test_bytes_are_summed_per_link_and_per_rank():
    summary = summarise(star(4, outwards=False), 3, itemsize=8)
    assert summary.link_nbytes == {(1, 0): 16, (2, 0): 16, (3, 0): 16}
    assert (summary.messages, summary.bytes_per_link, summary.bytes_per_nic) == (3, 16, 48)
    assert (summary.least_steps, summary.least_nic_nbytes) == (2, 16)
    assert (summary.step_ratio, summary.byte_ratio) == (1.5, 3.0)


@pytest.mark.parametrize(("operation", "name"), [key for key in dense_calls() if key[1] != "native"])
def test_no_strategy_beats_the_bounds(operation, name):
    for world_size in (2, 3, 5, 8, 13):
        for numel in (1, 7, 260):
            program = build(operation, name, world_size, numel, Options(block_numel=20))
            summary = summarise(program, verify(program).steps)
            assert summary.steps >= summary.least_steps == ceil(log2(world_size))
            assert summary.bytes_per_nic >= summary.least_nic_nbytes


def test_one_rank_needs_nothing():
    assert [least_nic_elements(one, 1, 100) for one in Collective] == [0] * 5
    summary = summarise(build("all_reduce", "ring", 1, 100), 0)
    assert (summary.least_steps, summary.step_ratio, summary.byte_ratio) == (0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("operation", "name"), [key for key in dense_calls() if key[1] not in ("double_tree", "bidirectional_exchange")]
)
def test_the_simulator_counts_the_same_steps(operation, name):
    """Two independent clocks; where ranks compete for a receiver they may choose differently, hence the exceptions."""
    for world_size in (2, 3, 4, 7, 8):
        program = build(operation, name, world_size, 40, Options(block_numel=5))
        assert verify(program).steps == count_steps(program)
