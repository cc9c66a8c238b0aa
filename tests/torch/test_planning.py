"""What a plan is made from: which routes, and their costs with one worker, who sends nothing."""

import pytest

pytest.importorskip("torch")
from penstock.codecs.momentum import Momentum
from penstock.errors import PlanError
from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.torch.compression import make_compression
from penstock.torch.planning import candidates, decide
from penstock.trace import Tensor, Trace

TRACE = Trace("toy", "a GPU", 1, "float32", 1e-3, tuple(Tensor(name, 1 << 20, 1e-3) for name in "dcba"))
ONEBIT = Route("ring", "onebit")
DENSE = ("native", "ring", "recursive_doubling")
PACKED = ("ring", "parameter_server", "all_gather")


def test_one_worker_needs_no_measured_line_of_the_engine():
    plan = decide(TRACE, Network(1, 0.0, 0.0, 1e-10), "exact", [Route("native")]).plan
    assert plan.iteration_seconds == pytest.approx(5e-3)
    with pytest.raises(PlanError, match="no measured line for 'native'"):
        decide(TRACE, Network(2, 1e-4, 1e-9, 1e-10), "exact", [Route("native")])


def test_the_measured_codec_of_one_worker_is_cut_into_buckets_that_hide_it():
    free = decide(TRACE, Network(1, 0.0, 0.0, 1e-10), "exact", [ONEBIT]).plan
    line = LinearCost(1e-5, 1e-10)  # 0.4 ms for each tensor, which takes 1 ms to compute
    measured = decide(TRACE, Network(1, 0.0, 0.0, 1e-10, {str(ONEBIT): line}), "exact", [ONEBIT]).plan
    assert free.iteration_seconds == pytest.approx(5e-3)
    assert len(measured.buckets) > len(free.buckets)
    assert measured.iteration_seconds == pytest.approx(5e-3 + 1e-5 + 4e-10 * (1 << 20), rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "codec", "wanted"),
    [
        ("auto", None, [*map(Route, DENSE)]),
        ("ring", None, [Route("ring")]),
        ("auto", "onebit", [Route(name, "onebit") for name in PACKED]),
        ("ring", "tbq", [Route("ring", "tbq")]),
        ("auto", "auto", [*map(Route, DENSE), *(Route(name, "onebit") for name in PACKED)]),
        ("ring", "auto", [Route("ring"), Route("ring", "onebit")]),
        ("all_gather", "auto", [*map(Route, DENSE), Route("all_gather", "onebit")]),  # which carries nothing dense
    ],
)
def test_candidates(strategy, codec, wanted):
    assert list(candidates(strategy, make_compression(codec))) == wanted


@pytest.mark.parametrize(
    ("options", "local"),
    [
        ({"codec": "onebit"}, ["hierarchical(outer=ring)+onebit"]),
        ({"codec": "auto"}, ["hierarchical(outer=ring)+onebit"]),
        ({"codec": "gtopk", "density": 0.1}, ["hierarchical(outer=gtopk_doubling)+sparse(density=0.1)"]),
        ({"codec": "gtopk_published", "density": 0.1}, []),  # as published, with nothing added
        ({"codec": "gtopk", "density": 0.1, "momentum": Momentum(0.9)}, []),  # ranks that encode nothing cannot mask
        ({"codec": None}, []),
    ],
)
def test_where_ranks_share_hosts_local_aggregation_is_a_candidate(options, local):
    compression = make_compression(**options)
    apart, sharing = (candidates("auto", compression, shares_hosts=each) for each in (False, True))
    assert sharing[: len(apart)] == apart
    assert [str(route) for route in sharing[len(apart) :]] == local
    assert candidates("ring", make_compression("onebit"), shares_hosts=True) == (Route("ring", "onebit"),)


@pytest.mark.parametrize(("seconds", "strategy"), [(1e-3, "hierarchical(outer=ring)"), (9e-3, "ring")])
def test_local_aggregation_is_chosen_where_its_measured_line_is_faster(seconds, strategy):
    routes = candidates("auto", make_compression("onebit"), shares_hosts=True)
    lines = {str(route): LinearCost(seconds if "hier" in route.strategy else 8e-3, 1e-12) for route in routes}
    plan = decide(TRACE, Network(4, 1e-4, 1e-9, 1e-10, lines), "exact", routes).plan
    assert {bucket.strategy for bucket in plan.buckets} == {strategy}


def test_dense_routes_beside_nccl_are_its_own():
    assert candidates("auto", make_compression(None), "nccl") == (Route("native"),)
