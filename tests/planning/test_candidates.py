"""Which routes a plan may use."""

import pytest

pytest.importorskip("torch")
from penstock.errors import PlanError
from penstock.exchange.compression import AUTO_CODECS, make_scheme
from penstock.exchange.momentum import Momentum
from penstock.plan import Route
from penstock.planning.candidates import candidates
from penstock.planning.planning import Planning
from penstock.program.composition import in_halves
from penstock.strategies import build_coded_part, build_part

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


def test_in_halves_dense_routes_are_those_that_leave_something_for_the_forward_pass():
    """The cut itself is the oracle: `native` and `recursive_doubling` have no second half."""
    found = candidates("auto", make_scheme(None), "exact", "gloo", False, 4, halves=True)
    for route in (*found, Route("native"), Route("recursive_doubling")):
        part, first = in_halves(build_part("all_reduce", route.strategy, 0, 4, 1 << 20))
        assert (first < len(part.instructions)) == (route in found)
    assert found
    assert candidates("native", make_scheme(None), "exact", "gloo", False, 4, halves=True) == (Route("native"),)


@pytest.mark.parametrize(
    ("codec", "wanted"),
    [
        ("onebit", {"ring", "parameter_server"}),  # all_gather passes no sums on
        ("gtopk", {"gtopk", "gtopk_doubling"}),  # neither has a second half
        ("topk", {"topk_allgather"}),  # which has no second half, and no other carries it
    ],
)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_in_halves_coded_routes_are_those_that_leave_something_if_any_does(codec, wanted, world_size):
    found = candidates("auto", make_scheme(codec), "exact", "gloo", False, world_size, halves=True)
    assert {route.strategy for route in found} == wanted
    every = candidates("auto", make_scheme(codec), "exact", "gloo", False, world_size)
    leaving = set()
    for route in every:
        part, first = in_halves(build_coded_part(route.strategy, 0, world_size, [0, 1 << 10])[0])
        leaving |= {route.strategy} if first < len(part.instructions) else set()
    assert wanted == (leaving or {route.strategy for route in every})


def test_a_race_that_a_wrapper_does_not_run_is_refused_and_the_default_is_not():
    with pytest.raises(PlanError, match=r"race=True: this wrapper keeps the plan .* leave race out"):
        Planning(race=True).settings(races=False)
    assert [Planning(race=each).settings(races=False).race for each in (None, False)] == [False, False]
    assert [Planning(race=each).settings().race for each in (None, True, False)] == [True, True, False]
