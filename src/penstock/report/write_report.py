"""Writes a report: the page, the same data as JSON beside it, and a Perfetto file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import FormatError
from penstock.fields import write_json
from penstock.report.found_runs import find_runs
from penstock.report.perfetto import save_perfetto
from penstock.report.run_page import make_page
from penstock.report.run_perfetto import run_timelines
from penstock.report.run_report import report_document

LAST_STEPS = 100  # of each run in the Perfetto file


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
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(make_page(document), encoding="utf-8")
    except OSError as error:
        raise FormatError(str(page), "file", error.strerror, "a path that can be written") from error
    write_json(data, document)
    save_perfetto(run_timelines(runs, last_steps), perfetto)
    return WrittenReport(page, data, perfetto, document)
