"""What the runs of a convergence study say together."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

Row = Mapping[str, Any]


_SAME = ("task", "workers", "global_batch", "steps")  # what runs must share to be compared


def against_dense(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the mean final metric of each method, and how much worse than dense it is, task by task.

    Of several dense runs with different learning rates the best one counts: dense gets what suits it. Where that is not
    the method's own rate, `worse_at_same_rate` says how much worse than dense at that rate it is.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((*(row[name] for name in _SAME), row["method"]), []).append(row)
    return [_summary(key, runs, _dense(key, groups)) for key, runs in groups.items()]


def plain_name(method: str) -> str:
    """Return a method's name without which tensors travel dense.

    >>> plain_name("dgc 0.01, corrected, dense below 65")
    'dgc 0.01, corrected'
    """
    return ", ".join(part for part in method.split(", ") if not part.startswith("dense below"))


def _dense(key: tuple[Any, ...], groups: Mapping[tuple[Any, ...], Sequence[Row]]) -> dict[float | None, float]:
    """Return what dense ends with beside a group of runs, by learning rate."""
    rivals = [runs for other, runs in groups.items() if other[:-1] == key[:-1] and other[-1].startswith("dense")]
    return {runs[0].get("learning_rate"): mean(_finals(runs)) for runs in rivals if _finals(runs)}


def _finals(runs: Sequence[Row]) -> list[float]:
    return [run["final"] for run in runs if run["final"] is not None]


def _summary(key: tuple[Any, ...], runs: Sequence[Row], dense: Mapping[float | None, float]) -> dict[str, Any]:
    finals = _finals(runs)
    found: dict[str, Any] = dict(zip((*_SAME, "method"), key, strict=True)) | {
        "metric": runs[0]["metric_name"], "seeds": len(finals)
    }  # fmt: skip
    if len(finals) < len(runs):
        found["diverged"] = len(runs) - len(finals)
    if finals:
        found |= {"final": mean(finals), "between_seeds": max(finals) - min(finals)}
    if finals and dense:
        higher = runs[0]["better"] == "higher"
        best = (max if higher else min)(dense.values())
        found["worse_than_dense"] = _worse(mean(finals), best, higher)
        same = dense.get(runs[0].get("learning_rate"), best)
        if same != best:
            found["worse_at_same_rate"] = _worse(mean(finals), same, higher)
    return found


def _worse(final: float, dense: float, higher: bool) -> float:
    return 1 - final / dense if higher else final / dense - 1
