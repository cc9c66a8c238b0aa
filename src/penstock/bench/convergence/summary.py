"""What the runs of a convergence study say together."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

Row = Mapping[str, Any]


_SAME = ("task", "workers", "global_batch", "steps")  # what runs must share to be compared


def against_dense(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the mean final metric of each method, and how much worse than dense it is, task by task.

    Of several dense runs with different learning rates the best one counts: dense gets what suits it.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((*(row[name] for name in _SAME), row["method"]), []).append(row)
    return [_summary(key, runs, _best_dense(key, groups)) for key, runs in groups.items()]


def _best_dense(key: tuple[Any, ...], groups: Mapping[tuple[Any, ...], Sequence[Row]]) -> float | None:
    rivals = [runs for other, runs in groups.items() if other[:-1] == key[:-1] and other[-1].startswith("dense")]
    means = [mean(finals) for finals in map(_finals, rivals) if finals]
    higher = groups[key][0]["better"] == "higher"
    return (max(means) if higher else min(means)) if means else None


def _finals(runs: Sequence[Row]) -> list[float]:
    return [run["final"] for run in runs if run["final"] is not None]


def _summary(key: tuple[Any, ...], runs: Sequence[Row], dense: float | None) -> dict[str, Any]:
    finals = _finals(runs)
    found: dict[str, Any] = dict(zip((*_SAME, "method"), key, strict=True)) | {
        "metric": runs[0]["metric_name"], "seeds": len(finals)
    }  # fmt: skip
    if len(finals) < len(runs):
        found["diverged"] = len(runs) - len(finals)
    if finals:
        found |= {"final": mean(finals), "between_seeds": max(finals) - min(finals)}
    if finals and dense:
        ratio = mean(finals) / dense
        found["worse_than_dense"] = 1 - ratio if runs[0]["better"] == "higher" else ratio - 1
    return found
