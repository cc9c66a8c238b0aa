"""Spanning tree, binary tree and double binary trees."""

from math import ceil, log2

import pytest

from penstock.program import Op
from penstock.strategies import Options, build
from penstock.strategies.double_tree import place_in_tree
from penstock.strategies.spanning_tree import edges_of
from penstock.verify import require_proof
from penstock.verify.summary import summarise


@pytest.mark.parametrize("world_size", range(2, 34))
def test_a_spanning_tree_takes_the_fewest_steps_from_any_root(world_size):
    for root in (0, world_size // 3, world_size - 1):
        for operation in ("broadcast", "reduce"):
            program = build(operation, "spanning_tree", world_size, 5, Options(root=root))
            assert require_proof(program).steps == ceil(log2(world_size))


def test_a_spanning_tree_reaches_every_rank_once():
    for world_size in range(1, 20):
        for root in range(world_size):
            own = [edges_of(rank, world_size, root) for rank in range(world_size)]
            into = [[edge.child for edge in edges if edge.child == rank] for rank, edges in enumerate(own)]
            assert into == [[] if rank == root else [rank] for rank in range(world_size)]
            assert all(edge in own[edge.parent] and edge in own[edge.child] for edges in own for edge in edges)


def test_the_example_of_the_spanning_tree_page_comes_true():
    proof = require_proof(build("broadcast", "spanning_tree", 5, 2, Options(root=1)))
    assert [(one.step, one.source, one.target) for one in proof.carried] == [(1, 1, 4), (2, 1, 2), (2, 4, 3), (3, 1, 0)]


def test_a_parent_sends_one_message_at_a_time():
    program = build("broadcast", "spanning_tree", 8, 4)
    assert [one.after for one in program.ranks[0]] == [(), (0,), (1,)]


@pytest.mark.parametrize("world_size", range(2, 34))
@pytest.mark.parametrize("name", ["binary_tree", "spanning_tree"])
def test_an_all_reduce_goes_up_and_down_once(name, world_size):
    program = build("all_reduce", name, world_size, 5)
    summary = summarise(program, require_proof(program).steps)
    assert summary.steps == 2 * ceil(log2(world_size))
    assert set(summary.link_nbytes.values()) == {5 * 4}
    assert summary.messages == 2 * (world_size - 1)


def test_the_example_of_the_binary_tree_page_comes_true():
    proof = require_proof(build("all_reduce", "binary_tree", 6, 1))
    up = {(1, 1, 0), (1, 3, 2), (1, 5, 4), (2, 2, 0), (3, 4, 0)}
    down = {(4, 0, 4), (5, 0, 2), (5, 4, 5), (6, 0, 1), (6, 2, 3)}
    assert {(one.step, one.source, one.target) for one in proof.carried} == up | down


def depth(places, rank):
    parent = places[rank].parent
    return 0 if parent is None else 1 + depth(places, parent)


@pytest.mark.parametrize("world_size", range(1, 70))
def test_the_two_trees_are_trees_and_no_rank_is_inside_both(world_size):
    inner = []
    for second in (False, True):
        places = [place_in_tree(rank, world_size, second) for rank in range(world_size)]
        assert [place.parent for place in places].count(None) == 1
        assert all(
            rank in places[place.parent].children for rank, place in enumerate(places) if place.parent is not None
        )
        assert all(len(place.children) <= 2 for place in places)
        assert max(depth(places, rank) for rank in range(world_size)) <= ceil(log2(world_size + 1))
        inner.append({rank for rank, place in enumerate(places) if place.children})
    assert not inner[0] & inner[1]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 16, 33])
def test_double_trees_keep_all_links_busy(world_size):
    blocks = 32  # of each tree; a rank receives at most two blocks for each block of each tree: 4 x 32 steps
    program = build("all_reduce", "double_tree", world_size, 2 * blocks, Options(block_numel=1))
    summary = summarise(program, require_proof(program).steps)
    assert summary.bytes_per_nic <= 2 * program.numel * 4
    assert summary.steps <= 1.4 * 4 * blocks


def test_a_single_block_crosses_double_trees_in_logarithmic_time():
    program = build("all_reduce", "double_tree", 32, 2, Options(block_numel=1))
    assert require_proof(program).steps <= 4 * log2(32)


def merged_from(program):
    """Return, for every rank and position, whose blocks are added to it, in order."""
    found = {}
    for rank, instructions in enumerate(program.ranks):
        source = {}
        for one in instructions:
            if one.op is Op.RECV:
                source[one.write] = one.peer
            elif one.op is Op.MERGE:
                found.setdefault((rank, one.write.start), []).append(source[one.read])
    return found


@pytest.mark.parametrize("world_size", range(2, 17))
def test_double_trees_add_all_blocks_of_a_half_in_the_same_order(world_size):
    """Else a sum's rounding would depend on where in a message it stands, and a plan would change the training."""
    orders = {}
    for blocks in (1, 2, 3, 4, 6, 8, 12):
        program = build("all_reduce", "double_tree", world_size, 2 * blocks, Options(block_numel=1))
        for (rank, position), order in merged_from(program).items():
            orders.setdefault((rank, position // blocks), set()).add(tuple(order))
    assert all(len(found) == 1 for found in orders.values())
