"""Which routes are measured, one after the other, and what is chosen from them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
from penstock.curves import CodecCurves, Curve
from penstock.exchange.compression import make_scheme
from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.planning.candidates import candidates
from penstock.planning.choose import Choice, at_least, is_necessary, known_routes, next_route
from penstock.planning.decide import decide, decide_whether
from penstock.trace import Tensor, Trace

TRACE = Trace("toy", "cpu", 1, "float32", 1e-3, tuple(Tensor(name, 1 << 20, 1e-3) for name in "dcba"))
LINKS = Network(4, 1e-4, 1e-9, 1e-10)  # 1 GB/s: the toy's 16 MB take 25 ms in a ring


def survey(truth: dict[str, LinearCost], choice: Choice, network: Network = LINKS) -> tuple[list[str], Network]:
    """Measure what is wanted, one route after the other; return their names, and the network with their lines."""
    found = []
    while (route := next_route(choice, network)) is not None:
        assert str(route) not in network.all_reduce, "measured twice"
        found.append(str(route))
        line = truth.get(str(route), LinearCost(9.0, 0.0))
        network = replace(network, all_reduce={**network.all_reduce, str(route): line})
    return found, network


def test_the_engines_own_way_is_measured_first_and_alone_where_nothing_can_be_clearly_faster():
    choice = Choice(TRACE, "exact", candidates("auto", make_scheme(None), "exact"))
    assert survey({"native": LinearCost(1e-3, 1.6e-9)}, choice)[0] == ["native"]  # a ring: 0.6 ms + 1.5 ns per byte
    slow = survey({"native": LinearCost(1e-3, 5e-9), "ring": LinearCost(1e-3, 2e-9)}, choice)
    assert slow[0][:2] == ["native", "ring"]


FREE = {"bf16": 0.75e-9, "terngrad(bitwidth=2)": 0.094e-9, "onebit": 0.047e-9}  # seconds per byte in the ring
AUTO = Choice(TRACE, "exact", candidates("auto", make_scheme("auto", candidates=list(FREE)), "exact"), auto=True)


def lines_of(native: float, **times: float) -> dict[str, LinearCost]:
    """Return lines that take some times as long per byte as a codec that computes nothing; `ternary`: terngrad."""
    names = {"bf16": "bf16", "ternary": "terngrad(bitwidth=2)", "onebit": "onebit"}
    packed = {f"ring+{names[each]}": LinearCost(1e-3, factor * FREE[names[each]]) for each, factor in times.items()}
    return {"native": LinearCost(1e-3, native)} | packed


def test_no_codec_is_compiled_or_measured_where_none_can_pay():
    choice = replace(AUTO, trace=Trace("slow", "cpu", 1, "float32", 9.0, (Tensor("a", 1 << 20, 9.0),)))
    assert survey({"native": LinearCost(1e-3, 1.6e-9)}, choice)[0] == ["native"]


def test_a_codec_whose_bytes_alone_take_too_long_is_never_measured():
    found, network = survey(lines_of(1.6e-9, ternary=2, onebit=8), AUTO)
    assert found[:2] == ["native", "ring+terngrad(bitwidth=2)"]
    assert not any("bf16" in each for each in found)
    assert at_least(AUTO, network)["bf16"] > 0.01


def test_codecs_are_compared_by_their_first_strategy_and_only_the_best_by_others():
    found, _ = survey(lines_of(1.6e-9, ternary=30, onebit=2), AUTO)
    first = ["native", "ring+terngrad(bitwidth=2)", "ring+onebit"]
    assert found[:3] == first
    assert found[3:]
    assert all("onebit" in each for each in found[3:])


@given(
    st.tuples(*[st.sampled_from([1.0, 1.5, 3.0, 9.0, 30.0, 90.0])] * 3),
    st.sampled_from([1.6e-9, 4e-9]),
    st.sampled_from([1e-4, 1e-3, 1e-2]),
    st.sampled_from([1.0, 2.5]),
)
@settings(max_examples=40)
def test_the_codec_chosen_is_about_as_fast_as_after_measuring_every_one(factors, native, step, slowdown):
    """Whatever codecs take, if it is not less than their bytes do: 5% for each time that a gain had to be clear."""
    trace = Trace("toy", "cpu", 1, "float32", step, tuple(Tensor(name, 1 << 20, step) for name in "dcba"))
    choice, never = replace(AUTO, trace=trace, slowdown=slowdown), LinearCost(9.0, 0.0)
    truth = lines_of(native, **dict(zip(("bf16", "ternary", "onebit"), factors, strict=True)))
    _, network = survey(truth, choice)
    everything = replace(LINKS, all_reduce={str(route): truth.get(str(route), never) for route in choice.routes})
    lazily = decide_whether(trace, network, "exact", known_routes(network, choice.routes), slowdown).plan
    best = decide_whether(trace, everything, "exact", choice.routes, slowdown).plan
    assert lazily.iteration_seconds <= best.iteration_seconds / 0.95**2


CURVES = CodecCurves(1 / 32, Curve(1e-10, 1e-5), Curve(1e-10, 1e-5))


def test_once_a_codec_was_measured_its_other_strategies_are_as_much_slower_as_it_was():
    """all_gather decodes everything that all ranks send: by its closed form slower than the ring, by however much."""
    choice = Choice(TRACE, "exact", candidates("auto", make_scheme("onebit"), "exact"))
    curves = replace(LINKS, codecs={"onebit": CURVES})
    assert survey({"ring+onebit": LinearCost(1e-3, 9e-9)}, choice, curves)[0] == ["ring+onebit"]
    assert survey({"ring+onebit": LinearCost(1e-3, 9e-9)}, choice)[0] == [
        f"{name}+onebit" for name in ("ring", "parameter_server", "all_gather")
    ]


def test_pieces_are_tried_of_what_was_measured_and_cuts_can_help():
    routes = candidates("ring", make_scheme("onebit"), "joint")
    found, _ = survey(
        {"ring": LinearCost(0.1, 1e-8), "ring+onebit": LinearCost(1e-3, 1e-9)}, Choice(TRACE, "joint", routes)
    )
    assert found[:2] == ["ring", "ring+onebit"]
    assert set(found[2:]) <= {"ring+onebit/2", "ring+onebit/16"}
    plain, _ = survey({"ring+onebit": LinearCost(1e-3, 1e-9)}, Choice(TRACE, "exact", routes[1:]))
    assert plain == ["ring+onebit"]


def test_sparse_blocks_are_never_cut():
    routes = candidates("gtopk", make_scheme("gtopk"), "joint")
    found, _ = survey({"native": LinearCost(1.0, 0.0)}, Choice(TRACE, "joint", routes))
    assert not any("/" in each for each in found)


def test_a_network_that_was_given_needs_no_dense_line():
    choice = Choice(TRACE, "exact", candidates("auto", make_scheme(None), "exact"), trusted=True)
    assert next_route(choice, LINKS) is None
    packed = Choice(TRACE, "exact", candidates("auto", make_scheme("onebit"), "exact"), trusted=True)
    assert next_route(packed, LINKS) == Route("ring", "onebit")
    assert is_necessary(packed, LINKS, Route("ring", "onebit"))
    known = replace(LINKS, all_reduce={"ring+onebit": LinearCost(1e-3, 1e-9)})
    assert not is_necessary(packed, known, Route("all_gather", "onebit"))


def test_a_codec_that_was_asked_for_is_necessary_for_a_mixing_planner_too():
    choice = Choice(TRACE, "joint", candidates("auto", make_scheme("onebit"), "joint"))
    network = replace(LINKS, all_reduce={"native": LinearCost(0.1, 1e-8)})
    assert next_route(choice, network) == Route("ring", "onebit")
    assert is_necessary(choice, network, Route("ring", "onebit"))


@pytest.mark.parametrize(("seconds", "strategy"), [(1e-3, "hierarchical(outer=ring)"), (9e-3, "ring")])
def test_local_aggregation_is_chosen_where_its_measured_line_is_faster(seconds, strategy):
    routes = candidates("auto", make_scheme("onebit"), "exact", shares_hosts=True)
    lines = {str(route): LinearCost(seconds if "hier" in route.strategy else 8e-3, 1e-12) for route in routes}
    plan = decide(TRACE, Network(4, 1e-4, 1e-9, 1e-10, lines), "exact", routes).plan
    assert {bucket.strategy for bucket in plan.buckets} == {strategy}
