from penstock.strategies import coded_only_names, names, sparse_names
from planning_time import claims, routes, slowest


def test_every_strategy_is_planned_by_dense_coded_and_sparse_ones_included():
    planned = {name.partition("+")[0] for name in routes()} - {"all of them"}
    assert planned == ({*names("all_reduce"), *coded_only_names(), *sparse_names()} - {"native"})


def test_the_slowest_route_of_each_planner_is_kept_and_all_are_claimed():
    pairs = [
        {"planner": "exact by ring", "seconds": 0.1},
        {"planner": "exact by parameter_server", "seconds": 1.2},
        {"planner": "joint by ring", "seconds": 0.3},
    ]
    assert [row["planner"] for row in slowest(pairs)] == ["exact by parameter_server", "joint by ring"]
    assert [claim.holds for claim in claims(pairs)] == [True, False, True]
