import numpy as np
import pytest

import torch_surface as surface
from penstock.errors import PlanError
from spawn import spawn, spawn_outcomes

ALONE = {"buffers_of_their_own", "no_autograd_hooks", "ignored_first"}  # ranks differ, with torch too


@pytest.fixture(scope="module")
def two_ranks():
    return spawn(2, surface.run, list(surface.CASES))


@pytest.mark.parametrize("route", surface.ROUTES)
@pytest.mark.parametrize("case", surface.CASES)
def test_every_feature_of_torchs_wrapper_does_what_it_does_with_torch(two_ranks, case, route):
    for found in (rank[case] for rank in two_ranks):
        assert_alike(found["stock"], found[route])
    if case not in ALONE:
        assert_alike(two_ranks[0][case][route], two_ranks[1][case][route])


def assert_alike(expected, found):
    assert type(found) is type(expected), found
    if not isinstance(expected, dict):
        assert found == expected
        return
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            assert found[name] == value, name


def test_a_context_of_join_that_is_entered_again_is_refused():
    refused = spawn_outcomes(2, surface.join_twice)[0].value
    assert isinstance(refused, PlanError)
    assert "call join() anew" in str(refused)


def test_fewer_ranks_go_on_with_a_plan_of_their_own_and_stay_alike():
    first, second, _ = spawn(3, surface.shrink_the_group)
    assert first["workers"] == (3, 2)
    assert_alike(first, second)


# What a codec makes of a dense float32 gradient, on two ranks: bits for each element over 32. A sparse entry is
# a 16-bit index and a value, 6 bytes, and is sent once, where a dense ring sends 4 bytes an element in two halves.
PROMISED = {
    ("ring", "onebit"): 1 / 32,
    ("ring", "terngrad(bitwidth=2)"): 2 / 32,
    ("ring", "fp8"): 8 / 32,
    ("ring", "fp16"): 16 / 32,
    ("parameter_server", "onebit"): 1 / 32,
    ("all_gather", "onebit"): 1 / 32,
    ("gtopk_doubling", "sparse(density=0.01)"): 6 / 4 * 0.01,
}
OPTIONS = {
    "as it comes": {},
    "unused parameters": {"find_unused_parameters": True},
    "unused parameters, gradients of their own": {"find_unused_parameters": True, "gradient_as_bucket_view": False},
    "gradients of their own": {"gradient_as_bucket_view": False},
    "static graph": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 0.1},
    "autocast": {"autocast": True},
    "one bucket": {"planner": "single"},
    "a bucket for each": {"planner": "wfbp", "bulk": False},
    "a given plan": {"order": "right"},
    "a given plan, other order": {"order": "wrong"},
    "a given plan, unused parameters": {"order": "right", "find_unused_parameters": True},
    "a given plan, other order, unused parameters": {"order": "wrong", "find_unused_parameters": True},
    "a given plan, autocast": {"order": "wrong", "autocast": True},
}
FEW = ("as it comes", "unused parameters", "a given plan, other order")
WIRE = [(route, name) for name in OPTIONS for route in PROMISED]
QUICK = [(route, name) for route, name in WIRE if route == ("ring", "onebit") or name in FEW]


def travel(cases):
    """Return what rank 0 sent in each case."""
    found = spawn(2, surface.used_routes, [(*route, OPTIONS[name]) for route, name in cases])
    return dict(zip(cases, found[0], strict=True))


@pytest.fixture(scope="module")
def wire():
    return travel(QUICK)


@pytest.mark.parametrize(("route", "options"), QUICK)
def test_the_wire_carries_what_the_codec_promises(wire, route, options):
    assert_as_promised(route, wire[route, options])


@pytest.mark.slow
def test_the_wire_carries_what_every_codec_promises_under_every_option():
    for (route, _), found in travel(WIRE).items():
        assert_as_promised(route, found)


def assert_as_promised(route, found):
    strategy, codec = route
    assert found["ratio"] == pytest.approx(PROMISED[route], rel=0.08), found["explain"]  # headers, of 1 KB and more
    used = [line for line in found["explain"].splitlines() if line.startswith("last iteration sent")]
    assert used
    assert all(f"by {strategy}+{codec}" in line for line in used), found["explain"]


def test_a_bucket_that_is_not_as_planned_is_named_once(wire):
    asked = {name: options.get("order") for name, options in OPTIONS.items()}
    for (_, name), found in wire.items():
        unplanned = asked[name] == "wrong"
        assert bool(found["warned"]) == unplanned, name
        assert len(set(found["warned"])) == len(found["warned"])


@pytest.mark.parametrize(("options", "message"), surface.REFUSED)
def test_options_that_exclude_one_another_are_refused_on_all_ranks(options, message):
    with pytest.raises(PlanError, match=message):
        spawn(2, surface.make_wrapper, options)
