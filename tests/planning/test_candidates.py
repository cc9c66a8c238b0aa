"""Which routes a plan may use."""

import pytest

pytest.importorskip("torch")
from penstock.exchange.compression import AUTO_CODECS, make_scheme
from penstock.exchange.momentum import Momentum
from penstock.plan import Route
from penstock.planning.candidates import candidates

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
        ("auto", "auto", "exact", [*DENSE, *(Route(name, codec) for codec in AUTO_CODECS for name in PACKED)]),
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
    assert list(candidates(strategy, make_scheme(codec), planner)) == wanted


def test_dense_routes_beside_nccl_are_its_own():
    assert candidates("auto", make_scheme(None), "exact", "nccl") == (Route("native"),)


def test_where_messages_are_queued_on_a_device_those_in_few_rounds_are_tried():
    """A ring's 2 (N - 1) rounds each wait for kernels of the model."""
    onebit = candidates("auto", make_scheme("onebit"), "exact", "nccl", shares_hosts=True)
    names = ("parameter_server", "all_gather", "hierarchical(outer=parameter_server)")
    assert list(onebit) == [Route(name, "onebit") for name in names]
    gtopk = candidates("auto", make_scheme("gtopk"), "exact", "nccl")
    assert [route.strategy for route in gtopk] == ["gtopk_doubling", "gtopk"]


@pytest.mark.parametrize(
    ("engine", "wanted"),
    [("gloo", ("all_gather", "ring", "parameter_server")), ("nccl", ("all_gather", "parameter_server"))],
)
def test_between_two_ranks_gathering_is_tried_first(engine, wanted):
    """It takes one round and rounds once; between more ranks it sends more bytes than the others."""
    two = candidates("auto", make_scheme("onebit"), "exact", engine, world_size=2)
    three, unknown = (candidates("auto", make_scheme("onebit"), "exact", engine, world_size=each) for each in (3, None))
    assert [route.strategy for route in two] == list(wanted)
    assert three == unknown
    assert set(three) == set(two)
    assert three[0].strategy == wanted[1]
    sparse = [candidates("auto", make_scheme("gtopk"), "exact", engine, world_size=each) for each in (2, 3)]
    assert sparse[0] == sparse[1]


def test_a_user_may_name_the_candidates_sparse_ones_too():
    compression = make_scheme("auto", candidates=["bf16", "gtopk(density=0.01)"])
    packed = [route for route in candidates("auto", compression, "exact") if route.codec]
    sparse = [Route(name, "sparse(density=0.01)") for name in ("gtopk_doubling", "gtopk")]
    assert packed == [*(Route(name, "bf16") for name in PACKED), *sparse]


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
    compression = make_scheme(**options)
    apart, sharing = (candidates("auto", compression, "exact", shares_hosts=each) for each in (False, True))
    assert sharing[: len(apart)] == apart
    assert [str(route) for route in sharing[len(apart) :]] == local
    assert candidates("ring", make_scheme("onebit"), "exact", shares_hosts=True) == (Route("ring", "onebit"),)
