from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from every_call import sparse_calls
from penstock.errors import StrategyError
from penstock.program import Op
from penstock.strategies import Options, build, coded_names, compressed_program, names
from penstock.verify import require_proof
from penstock.verify.summary import summarise

INNER = [name for name in names("reduce") if name != "native"]
OUTER = [name for name in names("all_reduce") if name not in ("native", "hierarchical")]


@pytest.mark.parametrize(("inner", "outer"), list(product(INNER, OUTER)))
def test_any_strategy_may_be_used_inside_and_between_nodes(inner, outer):
    for world_size, size in product((1, 2, 7, 12), (1, 3, 4, 20)):
        options = Options(ranks_per_node=size, inner=inner, outer=outer, block_numel=3)
        assert require_proof(build("all_reduce", "hierarchical", world_size, 19, options)).proved


def test_only_leaders_talk_across_nodes_and_send_what_the_outer_strategy_sends():
    program = build("all_reduce", "hierarchical", 8, 24, Options(ranks_per_node=2))
    links = summarise(program, require_proof(program).steps).link_nbytes
    across = {link: nbytes for link, nbytes in links.items() if link[0] // 2 != link[1] // 2}
    assert across == {(0, 2): 144, (2, 4): 144, (4, 6): 144, (6, 0): 144}  # 2 (4-1)/4 of 24 x 4 bytes
    assert set(links) - set(across) == {(r + i, r + 1 - i) for r in range(0, 8, 2) for i in (0, 1)}


def test_the_example_of_the_page_takes_six_steps():
    assert require_proof(build("all_reduce", "hierarchical", 6, 6, Options(ranks_per_node=2))).steps == 6


@pytest.mark.parametrize("place", ["inner", "outer"])
@pytest.mark.parametrize("name", ["native", "hierarchical"])
def test_what_takes_all_ranks_cannot_be_a_part(place, name):
    with pytest.raises(StrategyError, match=f"hierarchical: {name} cannot be a part of it; choose another inner or"):
        build("all_reduce", "hierarchical", 4, 8, Options(**{place: name}))


def test_an_unknown_part_is_refused_by_name():
    with pytest.raises(StrategyError, match="no strategy 'rung'; known: ring, "):
        build("all_reduce", "hierarchical", 4, 8, Options(outer="rung"))


COMPRESSED = [*(name for name in coded_names() if name != "hierarchical"), *(name for _, name in sparse_calls())]


@st.composite
def placements(draw):
    """Draw nodes of any sizes whose ranks stand in any order."""
    world_size = draw(st.integers(1, 9))
    ranks = draw(st.permutations(range(world_size)))
    cuts = sorted({0, world_size, *draw(st.lists(st.integers(0, world_size), max_size=5))})
    return tuple(tuple(ranks[start:stop]) for start, stop in pairwise(cuts))


@given(placements(), st.sampled_from(INNER), st.sampled_from(OUTER), st.integers(0, 7))
@settings(deadline=None, max_examples=40)
def test_nodes_may_be_uneven_and_in_any_order(nodes, inner, outer, numel):
    options = Options(nodes=nodes, inner=inner, outer=outer, block_numel=3)
    program = build("all_reduce", "hierarchical", sum(map(len, nodes)), numel, options)
    assert require_proof(program).proved


@given(placements(), st.sampled_from(COMPRESSED), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_a_codec_in_uneven_nodes_is_used_by_their_leaders_alone_and_loses_nothing(nodes, outer, numel):
    world_size, leaders = sum(map(len, nodes)), {node[0] for node in nodes}
    program = compressed_program("hierarchical", world_size, numel, Options(nodes=nodes, outer=outer, block_numel=1))
    assert require_proof(program).proved  # conservation included: result + what residuals keep = all contributions
    home = {rank: node for node in nodes for rank in node}
    for rank, instructions in enumerate(program.ranks):
        assert rank in leaders or not any(one.op is Op.ENCODE for one in instructions)
        for one in instructions:
            if one.op is Op.SEND and one.read is not None and one.peer is not None:
                assert program.buffer(one.read.buffer).encoded == (home[rank] != home[one.peer])


def test_consecutive_nodes_are_what_a_number_of_ranks_per_node_makes():
    by_number = build("all_reduce", "hierarchical", 7, 9, Options(ranks_per_node=3))
    assert build("all_reduce", "hierarchical", 7, 9, Options(nodes=((0, 1, 2), (3, 4, 5), (6,)))) == by_number


@pytest.mark.parametrize("nodes", [((0, 1), (3,)), ((0, 1), (1, 2, 3)), ((0, 1, 2, 3), ()), ((0, 1, 2, 4),)])
def test_nodes_that_do_not_hold_each_rank_once_are_refused(nodes):
    with pytest.raises(StrategyError, match="wanted each of the ranks 0 to 3 once, and no empty node"):
        build("all_reduce", "hierarchical", 4, 8, Options(nodes=nodes))


def test_more_servers_than_nodes_are_refused_with_what_was_found():
    options = Options(nodes=((0, 2), (1, 3)), outer="parameter_server", servers=3)
    with pytest.raises(
        StrategyError, match=r"3 servers between 2 nodes \(\(0, 2\), \(1, 3\)\); wanted at most one for"
    ):
        compressed_program("hierarchical", 4, 8, options)


def test_a_leader_answers_other_nodes_before_its_own():
    """Links inside a node are fast, and the ranks of other nodes wait longer."""
    program = build("all_reduce", "hierarchical", 8, 4, Options(ranks_per_node=2, outer="binary_tree"))
    sends = [(index, one) for index, one in enumerate(program.ranks[0]) if one.op is Op.SEND]
    assert [one.peer for _, one in sends] == [4, 2, 1]
    assert sends[1][0] in sends[2][1].after
