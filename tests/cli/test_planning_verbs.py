"""The planning verbs as a user types them: tables, JSON, and one line with exit code 2 on bad input."""

import json
from dataclasses import replace
from importlib.metadata import version

import pytest

from command import penstock
from penstock.cost.clusters import CLUSTERS
from penstock.curves import CodecCurves, Curve
from penstock.network import save_network
from penstock.plan import load_plan
from toy_trace import toy_trace

TRACE = toy_trace(20, 10_000, 0.001, forward_seconds=0.02)
PLANNERS = ["naive", "wfbp", "single", "threshold", "greedy", "exact", "selective", "joint"]
ONEBIT = CodecCurves(1 / 32, Curve(1e-10, 1e-5), Curve(1e-10, 1e-5))


def succeed(*arguments):
    result = penstock(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def files(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(TRACE))
    save_network(CLUSTERS["gtop-k-1gbe"], tmp_path / "n.json")
    return tmp_path


def test_the_version_is_the_packages():
    assert succeed("--version") == f"penstock {version('penstock')}\n"


def test_plan_prints_the_plan_as_json(files):
    plan = json.loads(succeed("plan", files / "t.json", "--network", files / "n.json", "--planner", "greedy", "--json"))
    assert plan["planner"] == "greedy"
    assert plan["iteration_seconds"] > plan["non_overlapped_seconds"] > 0
    assert [name for bucket in plan["buckets"] for name in bucket["tensors"]] == [f"t{i}" for i in range(20)]
    assert plan["workers"] == 32


def test_bulks_are_written_with_the_plan_and_counted_as_messages(files):
    arguments = ("plan", files / "t.json", "--network", files / "n.json", "--planner", "wfbp", "--bulk")
    assert "buckets of wfbp" in succeed(*arguments, "--out", files / "p.json")
    plan = load_plan(files / "p.json")
    assert len(plan.buckets) == 20
    assert 1 <= len(plan.messages) < 20


def test_plans_are_timed_with_several_messages_under_way_as_training_has_them(files):
    network = replace(CLUSTERS["gtop-k-1gbe"], workers=4, codecs={"onebit": ONEBIT})
    save_network(network, files / "c.json")
    arguments = ("plan", files / "t.json", "--network", files / "c.json", "--planner", "wfbp")
    arguments += ("--all-reduce", "ring+onebit")
    one, four = (
        json.loads(succeed(*arguments, "--lanes", lanes, "--json"))["iteration_seconds"] for lanes in ("1", "4")
    )
    assert four < one  # startups of small messages pass at the same time
    told = succeed(*arguments, "--lanes", "4")
    assert "up to 4 messages at a time" in " ".join(told.split())
    assert "joint" not in told


def test_compare_does_it_for_all_planners(files):
    plans = json.loads(succeed("plan", files / "t.json", "--network", files / "n.json", "--compare", "--json"))
    assert [plan["planner"] for plan in plans] == PLANNERS
    assert min(plan["iteration_seconds"] for plan in plans) == plans[-1]["iteration_seconds"]


def test_plan_writes_plan_picture_and_perfetto_files(files):
    out, picture, trace = files / "p.json", files / "p.png", files / "p.perfetto.json"
    text = succeed(
        "plan", files / "t.json", "--network", "gtop-k-1gbe", "--workers", 4, "--out", out, "--picture", picture,
        "--perfetto", trace, "--all-reduce", "ring,recursive_doubling",
    )  # fmt: skip
    assert "exact <" in text
    assert load_plan(out).planner == "exact"
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}


def test_half_precision_halves_the_bytes(files):
    arguments = ("plan", files / "t.json", "--network", "gtop-k-1gbe", "--planner", "single", "--json")
    full, half = (json.loads(succeed(*arguments, *more)) for more in ((), ("--dtype", "float16")))
    assert half["buckets"][0]["nbytes"] * 2 == full["buckets"][0]["nbytes"]


def test_parameter_servers_push_and_pull(files):
    arguments = ("plan", files / "t.json", "--network", "gtop-k-1gbe", "--all-reduce", "parameter_server", "--json")
    lanes = {span["lane"] for span in json.loads(succeed(*arguments))["timeline"]}
    assert lanes == {"compute", "push", "pull"}


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_gtop_k_is_an_all_reduce_of_its_cluster_and_no_codec_there(files, verb):
    more = ("--workers", "4") if verb == "simulate" else ()
    arguments = (verb, files / "t.json", "--network", "gtop-k-1gbe", *more)
    for strategy in ("gtopk", "topk_allgather"):
        assert strategy in succeed(*arguments, "--all-reduce", strategy)
        assert strategy in succeed(*arguments, "--all-reduce", strategy, "--codecs", "sparse")
    result = penstock(*arguments, "--codecs", "gtopk")
    assert result.returncode == 2
    assert "--codecs: found 'gtopk', which sends blocks of 'sparse' by all-reduces of its own; wanted" in result.stderr


def test_joint_chooses_among_strategies_codecs_and_partitions(files):
    save_network(replace(CLUSTERS["gtop-k-1gbe"], codecs={"onebit": ONEBIT}), files / "c.json")
    arguments = ("plan", files / "t.json", "--network", files / "c.json", "--planner", "joint", "--json")
    dense = json.loads(succeed(*arguments))
    more = ("--codecs", "onebit", "--partitions", "1,4", "--all-reduce", "ring,parameter_server")
    packed = json.loads(succeed(*arguments, *more))
    assert {bucket["codec"] for bucket in dense["buckets"]} == {None}
    assert {bucket["codec"] for bucket in packed["buckets"]} == {"onebit"}
    assert packed["iteration_seconds"] < dense["iteration_seconds"]
    assert "+onebit" in succeed(*arguments[:-1], *more)


def test_codecs_without_curves_say_how_to_measure_them(files):
    result = penstock("plan", files / "t.json", "--network", "gtop-k-1gbe", "--planner", "joint", "--codecs", "onebit")
    assert result.returncode == 2
    assert "has no curves of codec 'onebit'; it has: sparse; measure them with `penstock measure" in result.stderr


def test_simulate_prints_rows_as_json(files):
    rows = json.loads(
        succeed(
            "simulate",
            files / "t.json",
            "--network",
            files / "n.json",
            "--workers",
            "4,8",
            "--all-reduce",
            "ring",
            "--json",
        )
    )
    assert len(rows) == 2 * 5
    assert {"workers", "planner", "messages", "iteration_seconds", "speedup", "efficiency"} <= set(rows[0])


def test_simulate_draws_the_scaling_curve(files):
    picture = files / "s.svg"
    text = succeed("simulate", files / "t.json", "--network", "gtop-k-1gbe", "--workers", "2,4", "--picture", picture)
    assert "one message after the other; drawn in" in " ".join(text.split())
    assert "<svg" in picture.read_text()


def test_estimated_times_say_so_wherever_they_are_printed(files):
    (files / "e.json").write_text(json.dumps(TRACE | {"times": "estimated"}))
    where = (files / "e.json", "--network", "gtop-k-1gbe")
    assert json.loads(succeed("plan", *where, "--json"))["times"] == "estimated"
    assert "estimated times" in succeed("plan", *where)
    assert "estimated times" in succeed("simulate", *where, "--workers", "4")
    rows = json.loads(succeed("simulate", *where, "--workers", "4", "--json"))
    assert {row["times"] for row in rows} == {"estimated"}


def test_reproduce_prints_all_papers_and_says_what_it_needs():
    text = succeed("reproduce")
    assert "Table 4, resnet50: tensors" in text
    assert "need the authors' trace" in text
    for kind in ("checked against what the paper prints", "the paper's formula or schedule on our machine",
                 "not checkable here", "the paper's numbers against one another"):  # fmt: skip
        assert f"linear-pipeline: {kind}" in text
    papers = json.loads(succeed("reproduce", "all", "--json"))
    assert list(papers) == ["mg-wfbp", "gtop-k", "linear-pipeline", "hipress"]
    claims = [claim for claims in papers.values() for claim in claims]
    for claim in claims:
        words = ("matches", "no more than printed", "differs", "measured", "not checked: ", "agree", "disagree: ")
        assert claim["verdict"].startswith(words)
        assert claim["verdict"].startswith("measured") == claim["kind"].startswith("the paper's formula")
    checked = [claim for claim in claims if claim["kind"].startswith("checked")]
    held = sum(claim["verdict"] == "matches" for claim in checked)
    assert f"\n{len(checked)} checked against what the papers print: {held} match" in text


def test_reproduce_redraws_the_figures(tmp_path):
    succeed("reproduce", "mg-wfbp", "--pictures", tmp_path / "figures")
    drawn = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert drawn == ["mg-wfbp-fig1.png", "mg-wfbp-fig10.png", "mg-wfbp-fig11.png", "mg-wfbp-fig2.png"]
    assert all(path.stat().st_size > 10_000 for path in (tmp_path / "figures").iterdir())


BAD = [
    (("plan", "{t}", "--network", "lan"), "no network called 'lan'; wanted a .json file or one of"),
    (("plan", "{t}", "--network", "{n}", "--planner", "best"), "no planner called 'best'; wanted one of naive, wfbp"),
    (("plan", "{t}", "--network", "{n}", "--all-reduce", "rong"), "no all-reduce called 'rong'"),
    (("plan", "{t}", "--network", "{n}", "--dtype", "int8"), "dtype 'int8'; wanted one of float64"),
    (("plan", "resnet51", "--network", "{n}"), "resnet51"),
    (("plan", "{t}.gone", "--network", "{n}"), "is neither a file nor a shipped trace; shipped are bert_base"),
    (("simulate", "{t}", "--network", "{n}", "--workers", "4,x"), "--workers: found '4,x'; wanted whole numbers > 0"),
    (("simulate", "{t}", "--network", "{n}", "--workers", "0"), "--workers: found '0'"),
    (("simulate", "{t}", "--network", "{n}", "--jitter", "-1"), "jitter is -1.0; wanted a finite number >= 0"),
    (
        ("simulate", "{t}", "--network", "{n}", "--workers", "2", "--picture", "/nowhere/x.png"),
        "wanted a path ending in",
    ),
    (("reproduce", "bible"), "no paper called 'bible'; wanted one of mg-wfbp, gtop-k, linear-pipeline, hipress or all"),
    (("reproduce", "mg-wfbp", "--trace", "gone.csv"), "gone.csv: file: found"),
    (("reproduce", "mg-wfbp", "--trace", "{t}"), "wanted 64 tensors, 13379136 elements: the authors' GoogLeNet"),
    (("reproduce", "gtop-k", "--trace", "{t}"), "only mg-wfbp's claims need one; leave it out"),
    (
        ("simulate", "{t}", "--network", "{n}", "--workers", "16,4", "--straggler", "2", "--stragglers", "9"),
        "9 stragglers among 4 workers; wanted at most as many",
    ),
    (
        ("simulate", "{t}", "--network", "{n}", "--stragglers", "9"),
        "--stragglers 9 without --straggler: wanted how many times longer they take",
    ),
]


def test_a_plan_for_no_workers_is_refused(files):
    result = penstock("plan", str(files / "t.json"), "--network", str(files / "n.json"), "--workers", "0")
    assert result.returncode == 2
    assert "Invalid value for '--workers'" in result.stderr


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(files, arguments, message):
    result = penstock(
        *(a.replace("{t}", str(files / "t.json")).replace("{n}", str(files / "n.json")) for a in arguments)
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_cut_off_file_is_one_line_and_exit_code_2(files):
    text = (files / "t.json").read_text()
    (files / "t.json").write_text(text[: len(text) // 2])
    result = penstock("plan", files / "t.json", "--network", files / "n.json")
    assert result.returncode == 2
    assert f"{files / 't.json'}: JSON: found" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_published_clusters_plan_and_simulate_with_their_codecs():
    text = "plan vgg19 --network hipress-100gbps --codecs onebit --planner joint --json"
    plan = json.loads(succeed(*text.split()))
    assert {bucket["codec"] for bucket in plan["buckets"]} >= {"onebit"}
    text = "plan vgg16 --network gtop-k-1gbe --all-reduce gtopk --json"
    plan = json.loads(succeed(*text.split()))
    assert {(bucket["strategy"], bucket["codec"]) for bucket in plan["buckets"]} == {("gtopk", "sparse")}
    text = "simulate vgg19 --network hipress-100gbps --codecs onebit --workers 16 --planners wfbp,joint --json"
    dense, chosen = json.loads(succeed(*text.split()))
    assert chosen["iteration_seconds"] < dense["iteration_seconds"]
    assert (dense["routes"], chosen["routes"]) == (["ring"], ["ring+onebit", "ring"])
    assert "ring+onebit, ring" in succeed(*text.replace(" --json", "").split())
