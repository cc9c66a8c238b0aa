"""Routes as command lines write them: what the runtime takes is let through, the rest refused by name."""

import pytest

from penstock.cli.options import check_routes
from penstock.errors import PenstockError


def test_routes_that_the_runtime_takes_are_let_through():
    check_routes(["native", "ring/4", "hierarchical(ranks_per_node=4)+onebit", "all_gather+terngrad(bitwidth=2)/2"])
    check_routes(["gtopk+sparse(density=0.01)", "parameter_server(servers=1)+onebit"])


@pytest.mark.parametrize(
    ("route", "message"),
    [
        ("best", "no all-reduce strategy called 'best'; wanted one of ring,"),
        ("all_gather", "no all-reduce strategy called 'all_gather'"),
        ("ring+best", "codec 'best'; wanted one of"),
        ("ring+terngrad(bitwidth=3)", "bitwidth is 3; wanted one of 1, 2, 4, 8"),
        ("hierarchical(best=4)", "best"),
    ],
)
def test_a_route_that_nobody_can_take_is_refused(route, message):
    with pytest.raises(PenstockError) as refused:
        check_routes([route])
    assert message in str(refused.value)
