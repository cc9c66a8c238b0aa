"""Writes a report: the page, the same data as JSON beside it, and a Perfetto file.

The page is one HTML file: template, style, scripts and data in one, nothing fetched from anywhere. The Perfetto file
has the last steps of all runs, and one iteration of each, predicted above measured; its size is bounded by a window of
steps, and by a number of spans for each timeline.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from penstock.errors import FormatError
from penstock.fields import json_text, write_json, write_text
from penstock.report.found_runs import FoundRun, find_runs
from penstock.report.perfetto import save_perfetto
from penstock.report.run_report import report_document
from penstock.run_record import Step
from penstock.timeline import Span, Timeline

SCRIPTS = (  # in the order in which they use one another
    "format.js", "dom.js", "axes.js", "cost.js", "ways.js", "planner.js", "methods.js", "curves.js", "breakdown.js",
    "timeline_paint.js", "timeline.js", "buckets.js", "sliders.js", "whatif.js", "main.js",
)  # fmt: skip
MOST_SPANS = 20_000  # of one timeline; about 3 MB of JSON
LAST_STEPS = 100  # of each run in the Perfetto file


def make_page(document: Mapping[str, Any]) -> str:
    """Return the page of a report's data."""
    parts = {
        "@TITLE@": escape(str(document["title"])),
        "@STYLE@": read_part("style.css"),
        "@SCRIPT@": "\n".join(read_part(name) for name in SCRIPTS),
        "@DATA@": embedded_json(document),
    }
    # in one pass, so that a mark inside the data is not taken for a part
    return re.sub("|".join(parts), lambda mark: parts[mark.group()], read_part("page.html"))


def read_part(name: str) -> str:
    """Return one of the files that a page is made of."""
    return files("penstock.report").joinpath("html", name).read_text(encoding="utf-8")


def embedded_json(document: Mapping[str, Any]) -> str:
    """Return JSON that can stand inside a script element: no `<` of a name can end the element."""
    return json_text(document, "the report", separators=(",", ":")).replace("<", "\\u003c")


def run_timelines(runs: Sequence[FoundRun], last_steps: int) -> dict[str, Timeline]:
    """Return the timelines of all runs by title: the last steps, one iteration as predicted, one as measured."""
    found: dict[str, Timeline] = {}
    for run in runs:
        found[f"{run.name}, last steps"] = step_window(run.record.steps, last_steps)
        found[f"{run.name}, one iteration predicted"] = _bounded(run.record.predicted)
        found[f"{run.name}, one iteration measured"] = _bounded(run.record.measured)
    return {title: timeline for title, timeline in found.items() if timeline.spans}


def step_window(steps: Sequence[Step], count: int) -> Timeline:
    """Return the last `count` steps as spans, counted from the beginning of the first of them."""
    if count < 1 or not steps:
        return Timeline(())
    kept = steps[-count:]
    before = steps[-count - 1].seconds if len(steps) > count else 0.0
    starts = [before, *(step.seconds for step in kept[:-1])]
    return Timeline(
        tuple(
            Span(_step_name(step), "steps", start - before, max(start, step.seconds) - before)
            for step, start in zip(kept, starts, strict=True)
        )
    )


def _step_name(step: Step) -> str:
    loss = "not finite" if step.loss is None else f"{step.loss:.4g}"
    return f"step {step.step}, loss {loss}"


def _bounded(timeline: Timeline | None) -> Timeline:
    """Return the timeline's earliest spans, so many that the file stays small."""
    if timeline is None:
        return Timeline(())
    return Timeline(tuple(sorted(timeline.spans, key=lambda span: span.start_seconds)[:MOST_SPANS]))


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """The files of a report and what it says."""

    page: Path
    data: Path
    perfetto: Path
    document: dict[str, Any]


def write_report(
    folder: Path, page: Path | None = None, baseline: str | None = None, last_steps: int = LAST_STEPS
) -> WrittenReport:
    """Write the report of every run below `folder` to `page` (default: report.html in that folder)."""
    runs = find_runs(folder)
    document = report_document(runs, baseline)
    page = folder / "report.html" if page is None else page
    data, perfetto = page.with_suffix(".json"), page.with_suffix(".perfetto.json")
    if data == page:
        raise FormatError(str(page), "--out", page.name, "a name that does not end in .json, such as report.html")
    write_text(page, make_page(document))
    write_json(data, document)
    save_perfetto(run_timelines(runs, last_steps), perfetto)
    return WrittenReport(page, data, perfetto, document)
