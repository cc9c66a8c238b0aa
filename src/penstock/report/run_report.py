"""A report as data: everything that report.html draws, and that report.json holds.

Long runs are thinned: a page cannot show more points than it has pixels. What is left out is said in the data.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from penstock.report.found_runs import FoundRun, baselines
from penstock.report.run_methods import method_rows, metric_title, summary_lines
from penstock.report.run_plans import plan_view
from penstock.report.what_if import what_if
from penstock.run_record import run_document

FORMAT = "penstock-report/1"
_IN_WORDS = {  # what a record says of its machine
    "cpu": "{}",
    "cores": "{} cores",
    "memory_gib": "{} GiB of memory",
    "kernel": "Linux {}",
    "python": "Python {}",
}
MOST_STEPS = 1000  # of one run in the report
MOST_SPANS = 20_000  # of one timeline in the report


def report_document(runs: Sequence[FoundRun], baseline: str | None = None) -> dict[str, Any]:
    """Return the report of `runs`, each compared with the run called `baseline` or with stock DDP."""
    rows = method_rows(runs, baselines(runs, baseline))
    return {
        "format": FORMAT,
        "title": f"Training {_listed([run.record.task for run in runs])}",
        "about": _about(runs),
        "metric_title": _metric_title(runs),
        "summary": summary_lines(rows),
        "methods": rows,
        "runs": [_run(run) for run in runs],
        "plans": [view for run in runs if (view := plan_view(run)) is not None],
        "what_if": what_if(runs),
        "versions": _versions(runs),
    }


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _about(runs: Sequence[FoundRun]) -> str:
    groups = _listed([run.group for run in runs])
    return f"{len(runs)} runs: {groups}. Computed on {_listed([run.record.device for run in runs])}."


def _metric_title(runs: Sequence[FoundRun]) -> str:
    return "; ".join(dict.fromkeys(metric_title(run.record.metric_name) for run in runs))


def _run(run: FoundRun) -> dict[str, Any]:
    """Return the run's record without what other parts of the report hold, its steps thinned."""
    document = run_document(run.record)
    left_out = {"format", "plan", "trace", "network"}
    kept = {name: value for name, value in document.items() if name not in left_out}
    every = max(1, -(-len(document["steps"]) // MOST_STEPS))
    timeline = {how: _spans(document["timeline"][how]) for how in ("predicted", "measured")}
    return {
        **kept,
        "name": run.name,
        "file": run.path,
        "group": run.group,
        "metric_title": metric_title(run.record.metric_name),
        "steps": thinned(document["steps"], every),
        "steps_every": every,
        "timeline": timeline,
        "timeline_about": _timeline_about(document["timeline"], timeline),
    }


def thinned(steps: Sequence[Any], every: int) -> list[Any]:
    """Return every n-th entry and the last one."""
    kept = list(steps[::every])
    return kept if not steps or kept[-1] is steps[-1] else [*kept, steps[-1]]


def _spans(spans: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    return sorted(spans or [], key=lambda span: float(span["start_seconds"]))[:MOST_SPANS]


def _timeline_about(whole: Mapping[str, Any], kept: Mapping[str, Sequence[Any]]) -> str:
    parts = []
    for how, spans in kept.items():
        if not whole[how]:
            parts.append(f"nothing {how}")
        else:
            ends = max(span["end_seconds"] for span in whole[how])
            cut = f" (the first {len(spans)} of {len(whole[how])} spans)" if len(spans) < len(whole[how]) else ""
            parts.append(f"{how} {1e3 * ends:.4g} ms{cut}")
    return f"One iteration: {', '.join(parts)}."


def _versions(runs: Sequence[FoundRun]) -> str:
    record = runs[0].record
    machine = ", ".join(_IN_WORDS.get(name, f"{name} {{}}").format(value) for name, value in record.machine.items())
    packages = ", ".join(f"{name} {value}" for name, value in record.versions.items())
    told = "; ".join(part for part in (machine, packages) if part)
    return f"Made by penstock {version('penstock')}." + (f" The runs: {told}." if told else "")
