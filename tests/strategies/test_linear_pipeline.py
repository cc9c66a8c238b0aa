import pytest

from penstock.program import Op
from penstock.strategies import Options, build
from penstock.strategies.pipeline import DEPTH
from penstock.verify import require_proof
from penstock.verify.summary import summarise


def steps(operation: str, world_size: int, blocks: int, root: int = 0) -> int:
    options = Options(block_numel=1, root=root)
    return require_proof(build(operation, "linear_pipeline", world_size, blocks, options)).steps


def test_four_blocks_on_three_ranks_take_nine_steps_not_ten():
    assert steps("all_reduce", 3, 4) == 9
    assert steps("reduce", 3, 4) + steps("broadcast", 3, 4) == 10


def test_the_example_of_the_page_comes_true():
    table: dict[tuple[int, int], dict[int, str]] = {}
    for one in require_proof(build("all_reduce", "linear_pipeline", 3, 4, Options(block_numel=1))).carried:
        name = "abcd"[one.elements[0]]
        table.setdefault((one.source, one.target), {})[one.step] = name.upper() if one.contributors == 7 else name
    assert table == {
        (0, 1): dict(enumerate("abcdABCD", 1)),
        (1, 2): dict(enumerate("abcdABCD", 2)),
        (2, 0): dict(enumerate("ABCD", 3)),
    }


@pytest.mark.parametrize("world_size", [2, 3, 4, 9, 33])
@pytest.mark.parametrize("blocks", [1, 5, 40])
def test_a_broadcast_or_reduce_takes_p_minus_one_steps_to_fill_and_one_per_block(world_size, blocks):
    for operation in ("broadcast", "reduce"):
        assert steps(operation, world_size, blocks, root=world_size // 2) == world_size - 1 + blocks - 1


@pytest.mark.parametrize("world_size", [3, 4, 9, 33])
def test_an_all_reduce_fills_the_pipe_once(world_size):
    blocks = 2 * world_size
    assert steps("all_reduce", world_size, blocks) == 2 * blocks + world_size - 2


def test_two_ranks_do_not_send_the_result_back_twice():
    assert steps("all_reduce", 2, 10) == 11


@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
def test_each_link_carries_the_data_once(operation):
    program = build(operation, "linear_pipeline", 5, 100_000)
    summary = summarise(program, require_proof(program).steps)
    assert list(summary.link_nbytes.values()) == [400_000] * 4
    assert summary.byte_ratio == 1.0


def test_reduction_of_a_block_overlaps_the_receipt_of_the_next():
    program = build("reduce", "linear_pipeline", 3, 12, Options(block_numel=1))
    instructions = program.ranks[0]
    recvs = [index for index, one in enumerate(instructions) if one.op is Op.RECV]
    merges = [index for index, one in enumerate(instructions) if one.op is Op.MERGE]
    for block, merge in enumerate(merges[:-1]):
        following = recvs[block + 1]
        assert following < merge, "the next receive is posted first"
        assert merge not in instructions[following].after
    assert program.buffers[0].numel == DEPTH


def test_the_default_block_makes_four_of_wangs_64_kilobytes():
    program = build("broadcast", "linear_pipeline", 2, 65536)
    assert [one.read.numel * 4 for one in program.ranks[0] if one.read is not None] == [65536] * 4
