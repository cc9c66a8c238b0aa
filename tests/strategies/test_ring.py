import pytest

from penstock.program import DATA, Op
from penstock.strategies import Options, build
from penstock.strategies.pipeline import DEPTH
from penstock.strategies.strategy import CHUNK_BLOCK
from penstock.verify import require_proof
from penstock.verify.summary import summarise


def sent(program) -> dict[int, dict[tuple[int, int], str]]:
    """Return step: (source, target): the slice that travels."""
    table: dict[int, dict[tuple[int, int], str]] = {}
    for one in require_proof(program).carried:
        table.setdefault(one.step, {})[one.source, one.target] = str(one.read)
    return table


def test_the_example_of_the_page_comes_true():
    a, b, c = "data[0:1]", "data[1:2]", "data[2:3]"
    assert sent(build("all_reduce", "ring", 3, 3)) == {
        1: {(0, 1): a, (1, 2): b, (2, 0): c},
        2: {(0, 1): c, (1, 2): a, (2, 0): b},
        3: {(0, 1): b, (1, 2): c, (2, 0): a},
        4: {(0, 1): a, (1, 2): b, (2, 0): c},
    }


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 16, 33])
def test_it_takes_two_n_minus_one_steps_and_the_least_bytes(world_size):
    program = build("all_reduce", "ring", world_size, 10 * world_size)
    summary = summarise(program, require_proof(program).steps)
    assert summary.steps == 2 * (world_size - 1)
    assert set(summary.link_nbytes.values()) == {2 * (world_size - 1) * 10 * 4}
    assert summary.byte_ratio == 1.0


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_either_half_takes_half_the_steps_and_the_least_bytes(operation):
    program = build(operation, "ring", 6, 60)
    summary = summarise(program, require_proof(program).steps)
    assert (summary.steps, summary.byte_ratio) == (5, 1.0)


def test_blocks_take_as_many_steps_as_there_are_blocks_in_all_chunks_on_the_way():
    program = build("all_reduce", "ring", 4, 4 * 12, Options(block_numel=3))
    assert require_proof(program).steps == 2 * 3 * 4


def test_the_next_block_is_received_while_one_is_merged():
    program = build("all_reduce", "ring", 3, 3 * 8, Options(block_numel=1))
    instructions = program.ranks[1]
    merges = [index for index, one in enumerate(instructions) if one.op is Op.MERGE]
    for index, merge in list(enumerate(merges))[:-DEPTH]:
        posted = [one for one in instructions[:merge] if one.op is Op.RECV]
        assert len(posted) > index + 1, "the receive after the one that is merged is posted before the merge"


def test_no_rank_sends_far_ahead_of_what_it_receives():
    program = build("all_reduce", "ring", 3, 3 * 40, Options(block_numel=1))
    received = sent_blocks = 0
    for one in program.ranks[0]:
        received += one.op is Op.MERGE or (one.op is Op.RECV and one.write is not None and one.write.buffer == DATA)
        sent_blocks += one.op is Op.SEND
        assert sent_blocks <= received + DEPTH + 1


def test_scratch_is_a_few_blocks_whatever_the_size():
    program = build("all_reduce", "ring", 4, 10_000_000)
    assert sum(buffer.numel for buffer in program.buffers) == DEPTH * CHUNK_BLOCK
