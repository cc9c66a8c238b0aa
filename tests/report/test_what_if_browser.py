"""What the page computes is what `penstock simulate` computes, to 1e-9, on a grid of everything its sliders can say."""

import itertools
import json
from urllib.parse import unquote

import pytest

from browser import PATIENCE_MS, chromium
from penstock.cost.ways import way_for
from penstock.curves import CodecCurves, Curve
from penstock.fields import parse_json
from penstock.network import LinearCost, Network, load_network, network_document, network_from_fields
from penstock.planners import PLANNERS
from penstock.report.what_if import closed_forms
from penstock.report.write_report import write_report
from penstock.simulator.iteration import predict
from penstock.simulator.scaling import scaling_study
from penstock.strategies import STRATEGIES
from penstock.trace import load_trace, trace_document
from penstock.traces import load_shipped
from report_samples import NETWORK, sample_trace, save_sample_runs

ROWS = """([trace, network, cases]) => {
  const model = modelOf(trace);
  return cases.map(([planner, routes, p]) => simulateRow(model, planner, routes.map(r => wayFor(network, r, p)), p));
}"""
ALL_REDUCE = closed_forms()
EQUAL = ("iteration_seconds", "speedup", "efficiency")
CONSTANTS = list(itertools.product((0.0, 1e-6, 3e-4), (0.0, 1e-10, 9e-9), (0.0, 2.5e-10)))
WORLDS = (1, 2, 3, 4, 7, 100, 2048)
SIMPLE = ("naive", "wfbp", "single", "threshold", "greedy", "exact")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    report = write_report(save_sample_runs(tmp_path_factory.mktemp("runs")))
    with chromium() as browser:
        opened = browser.new_page()
        opened.set_default_timeout(PATIENCE_MS)
        opened.goto(report.page.as_uri())
        yield opened


def agree(found, wanted, iteration):
    return found == pytest.approx(wanted, rel=1e-9, abs=1e-9 * iteration)


def compare(page, trace, network, strategies):
    """Assert that page and Python agree on every case; return how many there were."""
    cases = [(planner, [strategy], p) for strategy in strategies for p in WORLDS for planner in SIMPLE]
    found = page.evaluate(ROWS, [trace_document(trace), network_document(network), cases])
    planners = [PLANNERS[name] for name in SIMPLE]
    wanted = [row for strategy in strategies for row in scaling_study(trace, network, WORLDS, planners, strategy)]
    assert len(found) == len(wanted)
    for mine, row in zip(found, wanted, strict=True):
        assert (mine["workers"], mine["planner"], mine["cost"]) == (row.workers, row.planner, row.cost)
        assert agree(mine["non_overlapped_seconds"], row.non_overlapped_seconds, row.iteration_seconds)
        for name in EQUAL:
            assert agree(mine[name], getattr(row, name), 0.0), (name, row, network)
    return len(wanted)


@pytest.mark.parametrize("name", ["googlenet", None], ids=str)
def test_the_page_agrees_with_simulate_on_every_network(page, name):
    trace = sample_trace() if name is None else load_shipped(name)
    for alpha, beta, gamma in CONSTANTS:
        assert compare(page, trace, Network(4, alpha, beta, gamma), ("ring",)) == len(WORLDS) * len(SIMPLE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_the_page_agrees_with_simulate_on_every_all_reduce(page, dtype):
    network = Network(16, 4.5e-5, 1e-9, 2e-10)
    compared = compare(page, load_shipped("resnet50").with_dtype(dtype), network, tuple(ALL_REDUCE))
    assert compared == len(ALL_REDUCE) * len(WORLDS) * len(SIMPLE)


def test_lines_that_were_measured_hold_where_they_were_measured(page):
    assert compare(page, sample_trace(), NETWORK, ("ring", "halving_doubling")) == 2 * len(WORLDS) * len(SIMPLE)


ROUTES = (
    "ring+c",
    "ring+c/5",
    "parameter_server+c",
    "parameter_server+c/9",
    "binary_tree+c/3",
    "all_gather+c/2",
    "ring+measured",
)


@pytest.mark.parametrize("alpha", [0.0, 2e-4])
def test_codecs_are_costed_and_planned_alike(page, alpha):
    curves = CodecCurves(1 / 32, Curve(3e-10, 4e-5, 6e-5), Curve(2e-10, 2e-5), fixed_nbytes=16.0)
    line = {"ring+measured": LinearCost(9e-3, 4e-10)}
    network = Network(4, alpha, 8.5e-9, 2e-10, all_reduce=line, codecs={"c": curves, "measured": curves})
    trace = load_shipped("resnet50")
    cases = [("exact", list(routes), p) for p in WORLDS for r in ROUTES for routes in ([r], ["ring", r])]
    found = page.evaluate(ROWS, [trace_document(trace), network_document(network), cases])
    for mine, (_, routes, p) in zip(found, cases, strict=True):
        ways = [way_for(network, route, p).one_stage() for route in routes]
        plan = predict(trace, PLANNERS["exact"], ways, p)
        assert agree(mine["iteration_seconds"], plan.iteration_seconds, 0.0), (routes, p)
        assert mine["messages"] == len(plan.buckets)
        assert mine["compressed"] == sum(bucket.codec is not None for bucket in plan.buckets)


def test_a_codec_adds_its_curves_to_the_picture(page):
    page.locator("#whatif-codec").select_option(label="ring+onebit")
    assert page.locator("#whatif-chart path.curve").count() == 6
    shown = page.evaluate("WHAT_IF.rowsAt(WHAT_IF.workers.value)")
    model = page.evaluate("WHAT_IF.subject")
    network = parse_json(json.dumps(model["network"]), "page", "penstock-network/1", network_from_fields)
    for routes, row in ((["ring+onebit"], shown[4]), (["ring", "ring+onebit"], shown[5])):
        ways = [way_for(network, route, NETWORK.workers) for route in routes]
        plan = predict(sample_trace(), PLANNERS["exact"], ways, NETWORK.workers)
        assert agree(row["iteration_seconds"], plan.iteration_seconds, 0.0)
    assert "--all-reduce ring+onebit" in page.text_content("#whatif-command")
    page.locator("#whatif-codec").select_option(label="none")
    assert page.locator("#whatif-chart path.curve").count() == 4


def test_the_page_knows_every_closed_form(page):
    assert set(page.evaluate("Object.keys(ALL_REDUCE)")) == set(ALL_REDUCE)
    counted = {one.name for one in STRATEGIES.values() if one.counts is not None}
    assert set(page.evaluate("Object.keys(COMPRESSED)")) == counted


def test_a_strategy_without_a_closed_form_is_said_to_have_none(page):
    page.locator("#whatif-strategy").select_option(label="native")
    assert page.text_content("#whatif-note").startswith(
        "native: no closed form; known only as measured, with 4 workers"
    )
    assert "\u2013" not in page.text_content("#whatif-table")
    page.focus("#whatif-workers")
    page.keyboard.press("ArrowRight")
    assert "\u2013" in page.text_content("#whatif-table")
    page.keyboard.press("ArrowLeft")
    page.locator("#whatif-strategy").select_option(label="ring")
    assert page.text_content("#whatif-note") == ""


def test_several_ways_at_once_are_planned_alike(page):
    trace, network = load_shipped("vgg16"), Network(8, 2e-4, 1e-9, 2e-10)
    routes = ["ring", "recursive_doubling", "linear_pipeline"]
    found = page.evaluate(
        ROWS, [trace_document(trace), network_document(network), [("exact", routes, p) for p in WORLDS]]
    )
    for mine, p in zip(found, WORLDS, strict=True):
        plan = predict(trace, PLANNERS["exact"], [way_for(network, route, p) for route in routes], p)
        assert agree(mine["iteration_seconds"], plan.iteration_seconds, 0.0)
        assert mine["messages"] == len(plan.buckets)


def test_the_command_in_the_page_gives_the_table_in_the_page(page, tmp_path):
    for name, keys in (("workers", 20), ("rate", -2), ("latency", 4)):
        page.focus(f"#whatif-{name}")
        for _ in range(abs(keys)):
            page.keyboard.press("ArrowRight" if keys > 0 else "ArrowLeft")
    for link in page.query_selector_all("#whatif-command a"):
        document = unquote(link.get_attribute("href").partition(",")[2])
        (tmp_path / link.get_attribute("download")).write_text(document)
    words = page.text_content("#whatif-command").split()
    options = dict(zip(words[3::2], words[4::2], strict=True))
    planners = [PLANNERS[name] for name in options["--planners"].split(",")]
    trace, network = load_trace(tmp_path / "trace.json"), load_network(tmp_path / "network.json")
    rows = scaling_study(trace, network, [int(options["--workers"])], planners, options["--all-reduce"])
    shown = page.evaluate("WHAT_IF.rowsAt(WHAT_IF.workers.value)")
    assert network.alpha_seconds != NETWORK.alpha_seconds
    assert network.beta_seconds_per_byte != NETWORK.beta_seconds_per_byte
    for mine, row in zip(shown, rows, strict=True):
        assert agree(mine["iteration_seconds"], row.iteration_seconds, 0.0)
        assert mine["planner"] == row.planner


CROSSED = """() => {
  const curves = [...document.querySelectorAll("#whatif-chart path.curve")];
  const labels = [...document.querySelectorAll("#whatif-chart text.measured-dot")].map(label => label.getBBox());
  const points = curves.flatMap(curve => Array.from({length: 2000}, (_, at) =>
    curve.getPointAtLength(at / 1999 * curve.getTotalLength())));
  const inside = (box, p) => p.x > box.x && p.x < box.x + box.width && p.y > box.y && p.y < box.y + box.height;
  const meet = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
  return {
    labels: labels.length,
    crossed: labels.filter(box => points.some(p => inside(box, p))).length,
    overlapping: labels.filter((box, at) => labels.slice(at + 1).some(other => meet(box, other))).length,
  };
}"""


def test_no_label_of_the_chart_crosses_a_curve_or_another_label(page):
    dots = page.locator("#whatif-chart circle.measured-dot").count()
    assert dots >= 2
    for width in (1280, 700):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(200)  # it is drawn again
        found = page.evaluate(CROSSED)
        assert 1 <= found["labels"] <= dots
        assert (found["crossed"], found["overlapping"]) == (0, 0)
