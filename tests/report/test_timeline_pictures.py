"""A bucket has one colour in all pictures of a report, and a lane of a rank one row: pictures, Perfetto, the page."""

import json
import shutil
import subprocess

import pytest
from matplotlib.colors import to_hex

from penstock.report.found_runs import FoundRun
from penstock.report.perfetto import perfetto_document
from penstock.report.pictures import timelines_figure
from penstock.report.run_plans import BUCKET_COLOURS, bucket_colours
from penstock.report.run_report import report_document
from penstock.report.write_report import read_part
from penstock.timeline import COMMUNICATION, COMPUTATION, COMPUTE, Span, Timeline
from report_samples import sample_runs

PREDICTED = Timeline(
    (
        Span("f", COMPUTE, 0, 1),
        Span("a", "network", 1, 4),
        Span("a: encode", COMPUTATION, 1, 2),
        Span("a: send to 1", COMMUNICATION, 2, 4),
        Span("b", "network", 2, 6),
        Span("b: encode", COMPUTATION, 2, 3),
    )
)
MEASURED = Timeline(  # b was sent first, and rank 1 came before rank 0
    (
        Span("b: send to 0", COMMUNICATION, 1, 2, rank=1),
        Span("b: send to 1", COMMUNICATION, 2, 3, rank=0),
        Span("a: send to 1", COMMUNICATION, 3, 5, rank=0),
        Span("b: encode", COMPUTATION, 1, 2, rank=0),
    )
)
BOTH = {"predicted": PREDICTED, "measured": MEASURED}


def drawn_rows(figure):
    """Return the colours of each row of each panel, by the row's name."""
    for axis in figure.axes:
        names = [label.get_text() for label in axis.get_yticklabels()]
        bars = [[to_hex(colour) for colour in found.get_facecolor()] for found in axis.collections]
        yield dict(zip(names, bars, strict=True))


def test_a_picture_gives_a_bucket_one_colour_whichever_was_seen_first():
    predicted, measured = drawn_rows(timelines_figure(BOTH, "both"))
    first, second = BUCKET_COLOURS[:2]
    assert predicted["network"] == predicted["computation"] == [first, second]
    assert predicted["communication"] == [first]
    assert measured["rank 0 communication"] == [second, first]


def test_a_picture_has_a_row_for_each_lane_of_each_rank():
    predicted, measured = drawn_rows(timelines_figure(BOTH, "both"))
    assert list(predicted) == ["compute", "network", "computation", "communication"]
    assert list(measured) == ["rank 0 computation", "rank 0 communication", "rank 1 communication"]
    assert len(measured["rank 1 communication"]) == 1


def test_perfetto_names_a_slice_after_its_bucket_so_that_viewers_colour_it_alike():
    events = perfetto_document(BOTH)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["cat"] in (COMPUTATION, COMMUNICATION)]
    assert {event["name"] for event in slices} == {"a", "b"}
    assert {event["args"]["instruction"] for event in slices} == {"encode", "send to 0", "send to 1"}


def test_more_buckets_than_colours_take_them_in_turn():
    many = Timeline(tuple(Span(f"b{n}", "network", n, n + 1) for n in range(len(BUCKET_COLOURS) + 1)))
    found = list(bucket_colours((), [many]).values())
    assert found == [*BUCKET_COLOURS, BUCKET_COLOURS[0]]


def test_a_report_knows_the_colour_of_every_bucket_of_its_plans_and_timelines():
    document = report_document([FoundRun(run.name, "run.json", run) for run in sample_runs()])
    colours = document["bucket_colours"]
    messages = [bucket["message"] for plan in document["plans"] for bucket in plan["buckets"]]
    assert list(colours)[: len(document["plans"][0]["buckets"])] == messages[: len(document["plans"][0]["buckets"])]
    spans = [span for run in document["runs"] for how in run["timeline"].values() for span in how]
    assert {span["name"].split(": ")[0] for span in spans if span["lane"] != COMPUTE} | set(messages) == set(colours)


PAINT = """
const pen = new Proxy({}, {
  get: (kept, name) => (name in kept ? kept[name] : () => ({ width: 0 })),
  set: (kept, name, value) => { kept[name] = value; return true; },
});
hatching = (pen, colour) => colour;
const { timeline, colours } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const painted = [];
pen.fillRect = (x, y, wide, high) => { if (high === LANE_HEIGHT) painted.push(pen.fillStyle); };
const view = { colours, labelWidth: 0, plotWidth: 30, x: (seconds) => 3 * seconds };
const found = [];
for (const row of timelineRows(timeline).filter((each) => each.spans)) {
  painted.length = 0;
  paintSpans(pen, view, row, 0, { compute: "grey", paper: "white", ink: "black" }, {});
  found.push([row.how, row.rank, row.lane, [...painted]]);
}
console.log(JSON.stringify(found));
"""


def test_the_page_paints_rows_and_colours_as_the_report_says():
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node: the scripts of the page are run with it")
    colours = bucket_colours((), BOTH.values())
    spans = {
        how: [
            {
                "name": s.name,
                "lane": s.lane,
                "rank": s.rank,
                "start_seconds": s.start_seconds,
                "end_seconds": s.end_seconds,
            }
            for s in timeline.spans
        ]
        for how, timeline in BOTH.items()
    }
    script = read_part("timeline.js") + read_part("timeline_paint.js") + PAINT
    given = json.dumps({"timeline": spans, "colours": colours})
    result = subprocess.run([node, "-e", script], input=given, capture_output=True, text=True, check=True, timeout=60)
    a, b = colours["a"], colours["b"]
    assert json.loads(result.stdout) == [
        ["predicted", 0, "compute", ["grey"]],
        ["predicted", 0, "network", [a, b]],
        ["predicted", 0, "computation", [a, b]],
        ["predicted", 0, "communication", [a]],
        ["measured", 0, "computation", [b]],
        ["measured", 0, "communication", [b, a]],
        ["measured", 1, "communication", [b]],
    ]
