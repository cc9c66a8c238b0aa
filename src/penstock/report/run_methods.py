"""The table of methods: what each run reached, and where it loses against the one it is compared with."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.report.found_runs import FoundRun
from penstock.run_record import RunRecord

Row = dict[str, Any]
METRIC_TIE = 1e-3  # relative: sums in another order change the last digits of a metric
COST_TIE = 1e-2  # relative, of times and bytes: headers and the clock
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
    sending = sum(span.seconds for span in timeline.spans if span.lane != "compute" and span.rank == first)
    exposed = timeline.non_overlapped_seconds
    return {
        "compute_seconds": timeline.compute_seconds,
        "hidden_seconds": max(0.0, sending - exposed),
        "exposed_seconds": exposed,
    }


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
