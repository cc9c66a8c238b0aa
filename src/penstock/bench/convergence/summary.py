"""What the runs of a convergence study say together."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

Row = Mapping[str, Any]


def against_dense(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the mean final metric of each task, number of workers and method, and how much worse than dense it is."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["workers"], row["method"]), []).append(row)
    return [_summary(key, runs, groups.get((*key[:2], "dense"))) for key, runs in sorted(groups.items())]


def _summary(key: tuple[str, int, str], runs: list[Row], dense: list[Row] | None) -> dict[str, Any]:
    task, workers, method = key
    finals = [run["final"] for run in runs]
    found: dict[str, Any] = {
        "task": task, "workers": workers, "method": method, "metric": runs[0]["metric_name"],
        "epochs": runs[0]["epochs"], "seeds": len(finals), "final": mean(finals),
        "between_seeds": max(finals) - min(finals),
    }  # fmt: skip
    if dense:
        ratio = mean(finals) / mean(run["final"] for run in dense)
        found["worse_than_dense"] = 1 - ratio if runs[0]["better"] == "higher" else ratio - 1
    return found
