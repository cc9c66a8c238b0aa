"""What the page about convergence quotes of the studies."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from penstock.bench.convergence.summary import against_dense, plain_name
from penstock.report.benchmark_tables import markdown_rows

Record = Mapping[str, Any]
Row = Mapping[str, Any]
_NEAR = 0.01
_TASKS = {"resnet20": "ResNet-20", "vgg16-quarter": "VGG-16", "lstm": "LSTM"}


def behind_table(*records: Record) -> str:
    """Return how far every method ends behind dense, 4 and 8 workers, a column per study."""
    columns = [_behind(record["rows"]) for record in records]
    methods = list(dict.fromkeys(method for column in columns for method in column))
    rows = [(f"`{method}`", *(_cells(column.get(method, {})) for column in columns)) for method in methods]
    return markdown_rows(("", *(_heading(record["rows"][0]) for record in records)), rows)


def _behind(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for line in against_dense(rows):
        if line["method"] != "dense" and "worse_than_dense" in line:
            found.setdefault(plain_name(line["method"]), {})[line["workers"]] = line["worse_than_dense"]
    return found


def _heading(row: Row) -> str:
    return f"{_TASKS[row['task']]}, {row['steps']:,} steps"


def _cells(by_workers: Mapping[int, float]) -> str:
    return " / ".join(_percent(by_workers[workers]) if workers in by_workers else "-" for workers in (4, 8))


def _percent(behind: float) -> str:
    shown = f"{round(100 * behind, 1) + 0.0:.1f}%"  # never -0.0
    return f"**{shown}**" if behind <= _NEAR else shown


def published_table(*records: Record) -> str:
    """Return how much better gtopk ends than gtopk-published, with the standard error over seeds."""
    columns = [_ahead(record["rows"]) for record in records]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [(f"`gtopk {density}`, {workers} workers", *(column.get((density, workers), "") for column in columns))
            for density, workers in keys]  # fmt: skip
    return markdown_rows(("", *(_heading(record["rows"][0]) for record in records)), rows)


def _ahead(rows: Sequence[Row]) -> dict[tuple[str, int], str]:
    ends = {(row["method"], row["workers"], row["seed"]): row["final"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    higher = rows[0]["better"] == "higher"
    found = {}
    for method, workers in dict.fromkeys((row["method"], row["workers"]) for row in rows):
        published = method.replace("gtopk", "gtopk-published", 1)
        if method.startswith("gtopk ") and (published, workers, seeds[0]) in ends:
            ratios = [ends[method, workers, seed] / ends[published, workers, seed] for seed in seeds]
            gains = [ratio - 1 if higher else 1 / ratio - 1 for ratio in ratios]
            found[plain_name(method).split()[1], workers] = _with_error(gains)
    return found


def _with_error(gains: Sequence[float]) -> str:
    """Return the mean and its standard error in percent.

    >>> _with_error([0.01, 0.02, 0.03])
    '+2.0% +- 0.6'
    """
    return f"{100 * mean(gains):+.1f}% +- {100 * stdev(gains) / len(gains) ** 0.5:.1f}"
