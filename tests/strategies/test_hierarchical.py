from itertools import product

import pytest

from penstock.errors import StrategyError
from penstock.strategies import Options, build, names
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
    with pytest.raises(StrategyError, match="no strategy 'rung' for all_reduce"):
        build("all_reduce", "hierarchical", 4, 8, Options(outer="rung"))
