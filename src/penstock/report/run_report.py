"""A report as data: everything that report.html draws, and that report.json holds.

Long runs are thinned: a page cannot show more points than it has pixels. What is left out is said in the data.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from penstock.report.found_runs import FoundRun, baselines
from penstock.report.run_plans import plan_view, report_colours
from penstock.report.what_if import what_if
from penstock.run_record import RunRecord, run_document
from penstock.timeline import COMMUNICATION, COMPUTATION, COMPUTE, Span

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
        "bucket_colours": report_colours(runs),
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
        "timeline_about": _timeline_about(document["timeline"], timeline) + _queued_about(run.record),
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


QUEUED = (
    " This run computed on a GPU. Computation was timed there; compressed messages were queued there by the host, and "
    "their measured spans say when the host queued them, not when they travelled."
)


def _queued_about(record: RunRecord) -> str:
    """Return what spans of a GPU's run do not say: the host does not wait for messages that are queued on a device."""
    measured = record.measured is not None and any(span.lane != COMPUTE for span in record.measured.spans)
    return QUEUED if measured and record.codec is not None and record.device.startswith("NVIDIA") else ""


def _versions(runs: Sequence[FoundRun]) -> str:
    record = runs[0].record
    machine = ", ".join(_IN_WORDS.get(name, f"{name} {{}}").format(value) for name, value in record.machine.items())
    packages = ", ".join(f"{name} {value}" for name, value in record.versions.items())
    told = "; ".join(part for part in (machine, packages) if part)
    return f"Made by penstock {version('penstock')}." + (f" The runs: {told}." if told else "")


# The table of methods: what each run reached, and where it loses against the one it is compared with.


Row = dict[str, Any]
METRIC_TIE = 1e-2  # relative: two seeds differ by as much
COST_TIE = 2e-2  # relative, of times and bytes: headers and the clock
_HIGHER_IS_BETTER = ("accuracy", "correct", "f1", "bleu", "auc", "precision", "recall")


def higher_is_better(metric_name: str) -> bool:
    """Say whether more of this metric is better; losses, perplexities and bits are better small."""
    return any(word in metric_name.lower() for word in _HIGHER_IS_BETTER)


def metric_title(metric_name: str) -> str:
    """Return a metric's name and which way is better."""
    return f"{metric_name} ({'higher' if higher_is_better(metric_name) else 'lower'} is better)"


def method_rows(runs: Sequence[FoundRun], compared_with: Mapping[str, FoundRun]) -> list[Row]:
    """Return a row per run."""
    return [_row(run, compared_with[run.group]) for run in runs]


def _row(run: FoundRun, baseline: FoundRun) -> Row:
    record, other = run.record, baseline.record
    return {
        "name": run.name,
        "group": run.group,
        "is_baseline": run is baseline,
        "baseline": baseline.name,
        "metric_name": record.metric_name,
        "metric": final_metric(record),
        "iteration_seconds": record.iteration_seconds,
        "speedup": _quotient(other.iteration_seconds, record.iteration_seconds),
        "samples_per_second": record.samples_per_second,
        "bytes_per_iteration": record.bytes_per_iteration,
        "dense_bytes_per_iteration": record.dense_bytes_per_iteration,
        "ratio": _quotient(record.bytes_per_iteration, record.dense_bytes_per_iteration),
        "measured": _measured_parts(record),
        "predicted": _predicted_parts(record),
        "loses": [] if run is baseline else _losses(record, other, baseline.name),
    }


def final_metric(record: RunRecord) -> float | None:
    """Return the metric of the last evaluation."""
    return record.evaluations[-1].metric if record.evaluations else None


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _measured_parts(record: RunRecord) -> Row | None:
    if record.compute_seconds is None or record.exposed_seconds is None:
        return None
    return {
        "compute_seconds": record.compute_seconds,
        "hidden_seconds": record.hidden_seconds,
        "exposed_seconds": record.exposed_seconds,
    }


def _predicted_parts(record: RunRecord) -> Row | None:
    """Return the parts of the predicted timeline; what communication does not expose, it hides."""
    timeline = record.predicted or (record.plan.timeline if record.plan is not None else None)
    if timeline is None or not timeline.spans:
        return None
    first = min(span.rank for span in timeline.spans)
    inside = (COMPUTE, COMPUTATION, COMMUNICATION)  # the latter two are what whole buckets consist of
    sending = _covered([span for span in timeline.spans if span.lane not in inside and span.rank == first])
    exposed = timeline.non_overlapped_seconds
    return {
        "compute_seconds": timeline.compute_seconds,
        "hidden_seconds": max(0.0, sending - exposed),
        "exposed_seconds": exposed,
    }


def _covered(spans: Sequence[Span]) -> float:
    """Return how long at least one of the spans lasts: several buckets may be under way at a time."""
    total = end = 0.0
    for span in sorted(spans, key=lambda each: each.start_seconds):
        total += max(0.0, span.end_seconds - max(end, span.start_seconds))
        end = max(end, span.end_seconds)
    return total


def _losses(record: RunRecord, baseline: RunRecord, name: str) -> list[str]:
    """Return in words what is worse than in the baseline, by more than a tie."""
    found = []
    if (slower := _quotient(record.iteration_seconds, baseline.iteration_seconds)) and slower > 1 + COST_TIE:
        found.append(f"slower than {name}: {slower:.3g} times its time")
    mine, other = final_metric(record), final_metric(baseline)
    if mine is not None and other is not None and abs(mine - other) > METRIC_TIE * abs(other):
        worse = mine < other if higher_is_better(record.metric_name) else mine > other
        found += [f"worse {record.metric_name} than {name} by {abs(mine - other):.3g}"] if worse else []
    if mine is None and other is not None:
        found.append(f"no finite {record.metric_name}")
    if (more := _quotient(record.bytes_per_iteration, baseline.bytes_per_iteration)) and more > 1 + COST_TIE:
        found.append(f"sends {more:.3g} times the bytes of {name}")
    return found


def summary_lines(rows: Sequence[Row]) -> list[str]:
    """Return one sentence per method that is compared with another."""
    return [_sentence(row) for row in rows if not row["is_baseline"]]


def _sentence(row: Row) -> str:
    parts = []
    if row["speedup"] is not None:
        parts.append(f"{row['speedup']:.3g} times the speed of {row['baseline']}")
    if row["ratio"] is not None:
        parts.append(f"{100 * row['ratio']:.3g} % of the dense bytes")
    if row["metric"] is not None:
        parts.append(f"{row['metric_name']} {row['metric']:.4g}")
    told = ", ".join(parts) or "nothing measured to compare"
    return f"{row['name']}: {told}." + (f" It loses: {'; '.join(row['loses'])}." if row["loses"] else "")
