"""Options written behind a strategy's name."""

import doctest
import re

import pytest

import penstock.strategies
from penstock.errors import StrategyError
from penstock.plan import Route, parse_route
from penstock.strategies import parse_strategy


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(penstock.strategies).failed == 0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ring", ("ring", {})),
        ("parameter_server(servers=2)", ("parameter_server", {"servers": 2})),
        ("hierarchical( ranks_per_node = 8 )", ("hierarchical", {"ranks_per_node": 8})),
        ("hierarchical(outer=topk-allgather)", ("hierarchical", {"outer": "topk_allgather"})),
    ],
)
def test_a_strategy_is_a_name_and_its_options(text, wanted):
    assert parse_strategy(text) == wanted
    for route in (Route(text), Route(text, "sparse(density=0.1, value_bits=16)", 4)):
        assert parse_route(str(route)).codec == route.codec
        assert parse_strategy(parse_route(str(route)).strategy) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring(servers=2)", "strategy 'ring(servers=2)': no option 'servers'; wanted serial"),
        ("hierarchical(nodes=2)", "strategy 'hierarchical(nodes=2)': no option 'nodes'; wanted ranks_per_node, inner"),
        ("parameter_server(servers=a)", "strategy 'parameter_server(servers=a)': servers is 'a'; wanted a number"),
        ("parameter_server(servers=0)", "servers is 0; wanted >= 1"),
        ("ring(", "strategy 'ring('; wanted a name such as ring, or parameter_server(servers=2)"),
    ],
)
def test_what_is_no_option_is_refused(text, message):
    with pytest.raises(StrategyError, match="^" + re.escape(message)):
        parse_strategy(text)
