import json
from dataclasses import replace

import pytest

from penstock.errors import FormatError, PlanError
from penstock.plan import (
    Bucket,
    Plan,
    Route,
    bucket_runs,
    buckets_from_runs,
    cut_into_buckets,
    load_plan,
    parse_route,
    plan_document,
    save_plan,
)
from penstock.timeline import Span, Timeline
from penstock.trace import Tensor, Trace

TRACE = Trace("toy", "paper", 1, "float32", 1.0, tuple(Tensor(name, 10, 1.0) for name in "dcba"))
BUCKETS = cut_into_buckets(TRACE, [0, 3], [Route("ring"), Route("double_tree")])
PLAN = Plan(
    "toy", 4, "exact", BUCKETS, iteration_seconds=6.0, non_overlapped_seconds=1.0,
    timeline=Timeline((Span("forward", "compute", 0.0, 5.0), Span("d", "network", 2.0, 6.0))),
)  # fmt: skip


def test_a_plan_is_written_in_short_and_read_again():
    routes = [Route("ring"), Route("ring"), Route("ring", "terngrad(bitwidth=2)", 4)]
    plan = Plan("m", 2, "p", cut_into_buckets(TRACE, [0, 1, 3], routes))
    assert bucket_runs(plan) == ["ring: 1 1", "ring+terngrad(bitwidth=2)/4: 2"]
    assert buckets_from_runs(TRACE, bucket_runs(plan)) == plan.buckets
    assert bucket_runs(replace(plan, bulks=(2, 1))) == ["ring: 2", "ring+terngrad(bitwidth=2)/4: 2"]
    with pytest.raises(PlanError, match=r"hold 1 tensors; .* has 4"):
        buckets_from_runs(TRACE, ["ring: 1"])


def test_cutting_gives_consecutive_buckets():
    assert [b.tensors for b in BUCKETS] == [("d",), ("c", "b", "a")]
    assert [b.nbytes for b in BUCKETS] == [40, 120]
    assert [b.name for b in BUCKETS] == ["d", "c .. a"]


def test_a_plan_survives_the_round_trip(tmp_path):
    save_plan(PLAN, tmp_path / "p.json")
    assert load_plan(tmp_path / "p.json") == PLAN
    document = json.loads((tmp_path / "p.json").read_text())
    assert document["buckets"][1] == {
        "tensors": ["c", "b", "a"], "nbytes": 120, "strategy": "double_tree", "codec": None, "partitions": 1,
    }  # fmt: skip


def test_the_hash_covers_what_ranks_must_agree_on_and_nothing_else():
    assert replace(PLAN, iteration_seconds=1.0, planner="other", timeline=Timeline(())).hash == PLAN.hash
    assert replace(PLAN, overlap=False).hash != PLAN.hash
    assert replace(PLAN, buckets=(replace(BUCKETS[0], codec="onebit"), BUCKETS[1])).hash != PLAN.hash


def test_bulks_are_what_is_sent_and_survive_the_round_trip(tmp_path):
    one_each = cut_into_buckets(TRACE, range(4), [Route("ring")] * 4)
    plan = replace(PLAN, buckets=one_each, bulks=(2, 1, 1))
    assert [(each.tensors, each.nbytes) for each in plan.messages] == [(("d", "c"), 80), (("b",), 40), (("a",), 40)]
    assert plan.merged == replace(PLAN, buckets=cut_into_buckets(TRACE, [1, 2, 3], [Route("ring")] * 3))
    assert PLAN.messages == PLAN.buckets
    save_plan(plan, tmp_path / "p.json")
    assert load_plan(tmp_path / "p.json") == plan
    assert len({plan.hash, plan.merged.hash, replace(plan, bulks=(1, 2, 1)).hash, replace(plan, bulks=()).hash}) == 4
    assert "bulks" not in plan_document(PLAN)  # which older versions read


def test_a_bulk_has_one_route_and_bulks_hold_every_bucket():
    with pytest.raises(PlanError, match="buckets 0 to 1 are a bulk and travel by ring and double_tree; wanted one"):
        replace(PLAN, bulks=(2,))
    with pytest.raises(PlanError, match=r"bulks \[1\] of 2 buckets; wanted numbers that add up to it"):
        replace(PLAN, bulks=(1,))


def test_a_plan_is_checked_against_the_trace_it_is_used_with():
    PLAN.check_against(TRACE)
    with pytest.raises(PlanError, match="bucket 0 says 40 bytes; its tensors have 20"):
        PLAN.check_against(TRACE.with_dtype("float16"))
    with pytest.raises(PlanError, match="plan holds tensor 'd', which trace 'toy' does not have"):
        PLAN.check_against(replace(TRACE, tensors=TRACE.tensors[1:]))
    with pytest.raises(PlanError, match="plan lacks tensor 'e' of trace 'toy'"):
        PLAN.check_against(replace(TRACE, tensors=(*TRACE.tensors, Tensor("e", 1, 0.0))))
    with pytest.raises(PlanError, match="plan sends 'd' where trace 'toy' has 'a' ready"):
        PLAN.check_against(replace(TRACE, tensors=TRACE.tensors[::-1]))


def test_a_tensor_stands_in_one_bucket_only():
    with pytest.raises(PlanError, match="tensor 'x' is in buckets 0 and 1; a plan holds each tensor once"):
        Plan("m", 1, "p", (Bucket(("x",), 0, "ring"), Bucket(("x",), 0, "ring")))
    with pytest.raises(PlanError, match="tensor 'x' is in bucket 0 twice"):
        Plan("m", 1, "p", (Bucket(("x", "x"), 0, "ring"),))
    with pytest.raises(PlanError, match="bucket 0 is empty"):
        Plan("m", 1, "p", (Bucket((), 0, "ring"),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buckets": [{"tensors": ["a"], "nbytes": -4, "strategy": "ring"}]}, "buckets[0].nbytes: found -4"),
        (
            {"buckets": [{"tensors": [], "nbytes": 4, "strategy": "ring"}]},
            "buckets[0].tensors: found []; wanted at least one",
        ),
        ({"buckets": [{"tensors": ["a", "a"], "nbytes": 4, "strategy": "ring"}]}, "('a' stands twice)"),
        ({"buckets": [{"tensors": ["a"], "nbytes": 4}]}, "buckets[0].strategy: found nothing"),
        ({"buckets": [{"tensors": ["a"], "nbytes": 4, "strategy": "ring", "codec": 1}]}, "buckets[0].codec: found 1"),
        ({"planner": None}, "planner: found None; wanted a non-empty string"),
        ({"overlap": "yes"}, "overlap: found 'yes'; wanted true or false"),
        ({"bulks": [1, 0, 1]}, "bulks: found [1, 0, 1]; wanted a list of whole numbers >= 1"),
        ({"bulks": [1, 2]}, "bulks: found [1, 2]; wanted whole numbers that add up to 2"),
        ({"hash": "0"}, "hash: found '0'; wanted"),
        (
            {"timeline": [{"name": "x", "lane": "y", "start_seconds": 2, "end_seconds": 1}]},
            "timeline[0].end_seconds: found 1",
        ),
    ],
)
def test_a_broken_file_names_its_field(tmp_path, change, message):
    (tmp_path / "p.json").write_text(json.dumps(plan_document(PLAN) | change))
    with pytest.raises(FormatError) as caught:
        load_plan(tmp_path / "p.json")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "route"),
    [
        ("ring", Route("ring")),
        ("ring+onebit", Route("ring", "onebit")),
        ("parameter-server+terngrad(bitwidth=2)/4", Route("parameter_server", "terngrad(bitwidth=2)", 4)),
        ("ring+my/own.cll/8", Route("ring", "my/own.cll", 8)),
        ("ring/2", Route("ring", None, 2)),
    ],
)
def test_a_route_reads_what_it_writes(text, route):
    assert parse_route(text) == route
    assert parse_route(str(route)) == route


@pytest.mark.parametrize("text", ["", "+onebit", "ring+", "ring/x"])
def test_what_is_no_route_says_what_one_looks_like(text):
    with pytest.raises(PlanError, match=r"wanted STRATEGY, STRATEGY\+CODEC or"):
        parse_route(text)
