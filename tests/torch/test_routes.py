"""Which routes are measured first, and which then."""

import pytest

pytest.importorskip("torch")
from penstock.codecs.momentum import Momentum
from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.torch.compression import AUTO_CODECS, make_compression
from penstock.torch.planning import decide
from penstock.torch.routes import candidates, further
from penstock.trace import Tensor, Trace

TRACE = Trace("toy", "cpu", 1, "float32", 1e-3, tuple(Tensor(name, 1 << 20, 1e-3) for name in "dcba"))
DENSE = [Route(name) for name in ("native", "ring", "recursive_doubling")]
PACKED = ("ring", "parameter_server", "all_gather")


@pytest.mark.parametrize(
    ("strategy", "codec", "planner", "wanted"),
    [
        ("auto", None, "exact", DENSE),
        ("auto", None, "joint", DENSE),
        ("ring", None, "exact", [Route("ring")]),
        ("auto", "onebit", "exact", [Route(name, "onebit") for name in PACKED]),
        ("auto", "onebit", "selective", [*DENSE, *(Route(name, "onebit") for name in PACKED)]),
        ("ring", "tbq", "exact", [Route("ring", "tbq")]),
        ("ring", "tbq", "joint", [Route("ring"), Route("ring", "tbq")]),
        ("auto", "auto", "exact", [*DENSE, *(Route("ring", codec) for codec in AUTO_CODECS)]),
        ("ring", "auto", "exact", [Route("ring"), *(Route("ring", codec) for codec in AUTO_CODECS)]),
        ("all_gather", "onebit", "joint", [*DENSE, Route("all_gather", "onebit")]),  # which carries nothing dense
        ("gtopk", "gtopk", "joint", [*DENSE, Route("gtopk", "sparse(density=0.001)")]),
        (
            "hierarchical(outer=all_gather)",
            "onebit",
            "joint",
            [*DENSE, Route("hierarchical(outer=all_gather)", "onebit")],
        ),
    ],
)
def test_candidates(strategy, codec, planner, wanted):
    assert list(candidates(strategy, make_compression(codec), planner)) == wanted


def test_dense_routes_beside_nccl_are_its_own():
    assert candidates("auto", make_compression(None), "exact", "nccl") == (Route("native"),)


def test_a_user_may_name_the_candidates_sparse_ones_too():
    compression = make_compression("auto", candidates=["bf16", "gtopk(density=0.01)"])
    packed = [route for route in candidates("auto", compression, "exact") if route.codec]
    assert packed == [Route("ring", "bf16"), Route("gtopk_doubling", "sparse(density=0.01)")]


def measured(**milliseconds: float) -> Network:
    """Return four workers' network: `native`, and codecs by the ring."""
    lines = {
        name if name == "native" else f"ring+{name}": LinearCost(1e-3 * ms, 0.0) for name, ms in milliseconds.items()
    }
    return Network(4, 1e-4, 1e-9, 1e-10, lines)


def test_auto_goes_on_with_the_codec_that_is_predicted_to_be_fastest():
    compression = make_compression("auto", candidates=["bf16", "onebit"])
    routes = (Route("native"), Route("ring", "bf16"), Route("ring", "onebit"))
    more = further(TRACE, measured(native=40, bf16=20, onebit=4), "exact", routes, "auto", compression)
    others = [Route(name, "onebit") for name in PACKED[1:]]
    assert list(more) == [*others, Route("ring", "onebit", 2), Route("ring", "onebit", 16)]
    local = further(TRACE, measured(native=40, bf16=20, onebit=4), "exact", routes, "auto", compression, True)
    assert list(local) == [*others, Route("hierarchical(outer=ring)", "onebit"), *more[2:]]
    named = further(TRACE, measured(native=40, bf16=4, onebit=20), "exact", routes, "ring", compression)
    assert list(named) == [Route("ring", "bf16", 2), Route("ring", "bf16", 16)]


def test_a_mixing_planner_tries_other_numbers_of_pieces_where_it_compresses():
    routes, onebit = (Route("native"), Route("ring", "onebit")), make_compression("onebit")
    pays, does_not = measured(native=40, onebit=4), measured(native=4, onebit=40)
    wanted = (Route("ring", "onebit", 2), Route("ring", "onebit", 16))
    assert further(TRACE, pays, "joint", routes, "auto", onebit) == wanted
    assert further(TRACE, does_not, "joint", routes, "auto", onebit) == ()
    assert further(TRACE, pays, "exact", routes[1:], "auto", onebit) == ()


def test_sparse_blocks_are_never_cut():
    network = Network(
        4, 1e-4, 1e-9, 1e-10, {"native": LinearCost(1.0, 0.0), "gtopk+sparse(density=0.001)": LinearCost(1e-3, 0.0)}
    )
    routes = candidates("gtopk", make_compression("gtopk"), "joint")
    assert further(TRACE, network, "joint", routes, "gtopk", make_compression("gtopk")) == ()


@pytest.mark.parametrize(
    ("options", "local"),
    [
        ({"codec": "onebit"}, ["hierarchical(outer=ring)+onebit"]),
        ({"codec": "gtopk", "density": 0.1}, ["hierarchical(outer=gtopk_doubling)+sparse(density=0.1)"]),
        ({"codec": "gtopk_published", "density": 0.1}, []),  # as published, with nothing added
        ({"codec": "gtopk", "density": 0.1, "momentum": Momentum(0.9)}, []),  # ranks that encode nothing cannot mask
        ({"codec": None}, []),
    ],
)
def test_where_ranks_share_hosts_local_aggregation_is_a_candidate(options, local):
    compression = make_compression(**options)
    apart, sharing = (candidates("auto", compression, "exact", shares_hosts=each) for each in (False, True))
    assert sharing[: len(apart)] == apart
    assert [str(route) for route in sharing[len(apart) :]] == local
    assert candidates("ring", make_compression("onebit"), "exact", shares_hosts=True) == (Route("ring", "onebit"),)


@pytest.mark.parametrize(("seconds", "strategy"), [(1e-3, "hierarchical(outer=ring)"), (9e-3, "ring")])
def test_local_aggregation_is_chosen_where_its_measured_line_is_faster(seconds, strategy):
    routes = candidates("auto", make_compression("onebit"), "exact", shares_hosts=True)
    lines = {str(route): LinearCost(seconds if "hier" in route.strategy else 8e-3, 1e-12) for route in routes}
    plan = decide(TRACE, Network(4, 1e-4, 1e-9, 1e-10, lines), "exact", routes).plan
    assert {bucket.strategy for bucket in plan.buckets} == {strategy}
