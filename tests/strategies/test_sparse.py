"""Sparse all-reduces: their steps are those the pages draw, and the proof sees what would lose or double values."""

import pytest

from every_call import sparse_calls
from mutations import change, drop, find
from penstock.program import DATA, Collective, Op, Slice
from penstock.program.builder import ProgramBuilder
from penstock.simulator.program import count_steps
from penstock.strategies import Options, build
from penstock.verify import Kind, require_proof, verify


def kinds(program):
    return {finding.kind for finding in verify(program).findings}


def messages(name, world_size):
    proof = require_proof(build("all_reduce", name, world_size, 1))
    return sorted((one.step, one.source, one.target) for one in proof.carried)


def test_the_tree_on_6_ranks_goes_as_its_page_says():
    assert messages("gtopk", 6) == [
        *[(1, 1, 0), (1, 3, 2), (1, 5, 4), (2, 2, 0), (3, 4, 0)],
        *[(4, 0, 4), (5, 0, 2), (5, 4, 5), (6, 0, 1), (6, 2, 3)],
    ]


def test_doubling_on_5_ranks_goes_as_its_page_says():
    assert messages("gtopk_doubling", 5) == [
        *[(1, 2, 3), (1, 3, 2), (1, 4, 0), (2, 0, 1), (2, 1, 0)],
        *[(3, 0, 2), (3, 1, 3), (3, 2, 0), (3, 3, 1)],
        (4, 0, 4),
    ]


def test_the_all_gather_on_3_ranks_goes_as_its_page_says():
    assert messages("topk_allgather", 3) == [(1, 0, 1), (1, 1, 2), (1, 2, 0), (2, 0, 2), (2, 1, 0), (2, 2, 1)]


@pytest.mark.parametrize("world_size", range(1, 34))
def test_steps_grow_with_the_logarithm_for_gtopk_and_with_the_ranks_for_the_all_gather(world_size):
    rounds, power = (world_size - 1).bit_length(), world_size.bit_length() - 1
    wanted = {
        "gtopk": 2 * rounds,
        "gtopk_doubling": power + 2 * (world_size != 1 << power),
        "topk_allgather": world_size - 1,
    }
    assert {name: count_steps(build("all_reduce", name, world_size, 1)) for _, name in sparse_calls()} == wanted


def test_of_the_ranks_that_merge_the_same_blocks_exactly_one_keeps():
    program = build("all_reduce", "gtopk_doubling", 8, 1)
    merges = [[one for one in rank if one.op is Op.MERGE] for rank in program.ranks]
    keepers = [[rank for rank in range(8) if merges[rank][turn].keeps] for turn in range(3)]
    assert keepers == [[0, 2, 4, 6], [0, 4], [0]]


@pytest.mark.parametrize("name", ["gtopk", "gtopk_doubling"])
def test_a_merge_whose_values_nobody_keeps_is_found(name):
    program = build("all_reduce", name, 6, 1)
    broken = change(program, 0, find(program, 0, Op.MERGE), keeps=False)
    finding = verify(broken).findings[0]
    assert (finding.kind, finding.rank) == (Kind.LOST, 0)
    assert "block[0:1] += inbox" in str(finding)
    assert "drops what does not fit, and no rank keeps it: rank 0 in step" in str(finding)


def test_values_that_two_ranks_keep_are_found():
    program = build("all_reduce", "gtopk_doubling", 4, 1)
    index = find(program, 3, Op.MERGE, lambda one: not one.keeps)
    finding = verify(change(program, 3, index, keeps=True)).findings[0]
    assert (finding.kind, finding.rank) == (Kind.KEPT_TWICE, 3)
    assert "keeps what is kept or applied elsewhere too: rank 2 in step 1, rank 3 in step 1" in str(finding)


def test_keeping_of_a_merge_that_goes_into_no_result_is_found():
    """Rank 1 merges what it has with what arrives, and then takes the result from rank 0 instead."""
    program = build("all_reduce", "gtopk_doubling", 2, 1)
    decode = find(program, 1, Op.DECODE)
    wasted = change(program, 1, find(program, 1, Op.MERGE), keeps=True)
    assert kinds(drop(wasted, 1, decode)) == {Kind.MISSING, Kind.KEPT_TWICE}


def test_blocks_merged_in_another_order_give_other_bits():
    """Blocks are cut after every merge: (a + b) + c and (b + c) + a keep different entries."""
    builder = ProgramBuilder("gathered", Collective.ALL_REDUCE, 3, 1)
    blocks = [Slice(f"block{rank}", 0, 1) for rank in range(3)]
    for block in blocks:
        builder.scratch(block.buffer, 1, encoded=True)
    for rank in range(3):
        builder.encode(rank, blocks[rank], Slice(DATA, 0, 1))
        for other in range(3):
            if other != rank:
                builder.send(rank, other, blocks[rank])
                builder.recv(rank, other, blocks[other])
        for step in (1, 2):
            builder.merge(rank, blocks[rank], blocks[(rank + step) % 3], keeps=rank == 0)
        builder.decode(rank, Slice(DATA, 0, 1), blocks[rank])
    assert kinds(builder.build()) == {Kind.DIFFERENT_SUMS, Kind.LOST}


def test_a_block_that_is_merged_in_part_is_found():
    program = build("all_reduce", "gtopk", 2, 4)
    index = find(program, 0, Op.MERGE)
    one = program.ranks[0][index]
    cut = change(program, 0, index, write=_first_half(one.write), read=_first_half(one.read))
    assert Kind.CUT_ENCODING in kinds(cut)


def _first_half(touched):
    return type(touched)(touched.buffer, touched.start, touched.stop // 2)


def test_hierarchical_may_be_sparse_between_the_nodes():
    program = build("all_reduce", "hierarchical", 7, 5, Options(ranks_per_node=2, outer="gtopk_doubling"))
    assert kinds(program) == set()
