import json

from hypothesis import given
from hypothesis import strategies as st

from penstock.report.perfetto import perfetto_document, save_perfetto
from penstock.timeline import Span, Timeline

spans = st.builds(
    lambda name, lane, start, length, rank: Span(name, lane, start, start + length, rank),
    st.text(), st.sampled_from(["compute", "network", "push"]), st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 3),
)  # fmt: skip


@given(st.dictionaries(st.text(), st.lists(spans, max_size=8).map(lambda found: Timeline(tuple(found))), max_size=3))
def test_any_timeline_makes_a_valid_chrome_trace(timelines):
    document = json.loads(json.dumps(perfetto_document(timelines), allow_nan=False))
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["name"] == "thread_name" and e["ph"] == "M"}
    drawn = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert len(drawn) == sum(len(timeline.spans) for timeline in timelines.values())
    for event in drawn:
        assert (event["pid"], event["tid"]) in named
        assert event["ts"] >= 0
        assert event["dur"] >= 0


def test_timelines_and_ranks_are_processes_of_their_own(tmp_path):
    two_ranks = Timeline((Span("a", "compute", 0, 1, 0), Span("a", "compute", 0, 1, 1)))
    save_perfetto({"predicted": Timeline((Span("x", "network", 0, 2e-6),)), "measured": two_ranks}, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["measured, rank 0", "measured, rank 1", "predicted"]
    assert next(e for e in events if e["name"] == "x")["dur"] == 2.0  # microseconds
