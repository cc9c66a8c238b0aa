import pytest
from hypothesis import given
from hypothesis import strategies as st

from every_call import dense_calls, sparse_calls
from penstock.program import DATA, Op
from penstock.runtime.schedule import choose_window
from penstock.strategies import Options, build, build_compressed, coded_names
from penstock.strategies.pipeline import DEPTH, blocks


@given(st.integers(0, 50), st.integers(0, 100), st.integers(1, 30))
def test_blocks_cover_a_stretch_evenly_and_none_is_too_large(start, numel, block_numel):
    cut = blocks(start, start + numel, block_numel)
    assert len(cut) == -(-numel // block_numel)
    assert [block.start for block in cut] == [start, *(block.stop for block in cut[:-1])][: len(cut)]
    assert sum(block.numel for block in cut) == numel
    assert max((block.numel for block in cut), default=0) - min((block.numel for block in cut), default=0) <= 1
    assert all(0 < block.numel <= block_numel for block in cut)


@pytest.mark.parametrize(("operation", "name"), [*dense_calls(), *sparse_calls()])
def test_as_many_messages_in_flight_as_slots_are_enough(operation, name):
    for world_size in (2, 3, 4, 7, 8, 13):
        for numel, block_numel in ((30, None), (200, 3)):
            program = build(operation, name, world_size, numel, Options(block_numel=block_numel))
            assert choose_window(program, DEPTH) == DEPTH


@pytest.mark.parametrize("name", coded_names())
def test_as_many_are_enough_with_a_codec_too(name):
    """Also where some chunks have fewer batches than others: what is left out keeps its place in the order."""
    for world_size in (3, 5, 8):
        for bounds in ((0, 100, 5000, 400_000), (0, 400_000)):
            program, _ = build_compressed(name, world_size, bounds, Options(block_numel=20_000))
            assert choose_window(program, DEPTH) == DEPTH


@pytest.mark.parametrize("name", ["ring", "linear_pipeline", "double_tree", "parameter_server"])
def test_no_more_receives_wait_than_there_are_slots(name):
    program = build("all_reduce", name, 5, 400, Options(block_numel=4, partitions=100))
    for instructions in program.ranks:
        recvs = [index for index, one in enumerate(instructions) if one.op is Op.RECV]
        for earlier, later in zip(recvs, recvs[DEPTH:], strict=False):
            write = instructions[earlier].write
            assert write is not None
            settled = (
                earlier
                if write.buffer == DATA
                else next(
                    i
                    for i in range(earlier, len(instructions))
                    if instructions[i].op is Op.MERGE and earlier in before(instructions, i)
                )
            )
            assert settled in before(instructions, later)


def before(instructions, index: int) -> set[int]:
    found: set[int] = set()
    todo = list(instructions[index].after)
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += instructions[one].after
    return found
