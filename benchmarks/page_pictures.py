"""Pictures of the benchmarks: training, replayed traces, collectives, and what more hosts and other rates do."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.report.pictures import save_figure

Row = Mapping[str, Any]
Rows = Sequence[Row]
_DPI = {"collectives": 90}  # a large picture
_OURS, _PEER, _BASE, _EXPOSED = "#2b6cb0", "#c05621", "#a0aec0", "#f6ad55"


def draw_benchmarks(rows_by_benchmark: Mapping[str, Rows], folder: Path) -> dict[str, Path]:
    """Draw a picture of every benchmark that has one; return the paths by benchmark."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for benchmark, draw in PICTURES.items():
        if rows := [row for row in rows_by_benchmark.get(benchmark, ()) if not isinstance(row.get("error"), str)]:
            paths[benchmark] = folder / f"bench-{benchmark}.png"
            save_figure(draw(rows), paths[benchmark], _DPI.get(benchmark, 150))
    return paths


def draw_train(rows: Rows) -> Figure:
    """Draw a bar per method: computation, and what communication adds to it."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    counts = [sum(row["model"] == model for row in rows) for model in models]
    figure = Figure(figsize=(9, 1.2 + 0.3 * sum(counts)), layout="constrained")
    axes = figure.subplots(len(models), 1, squeeze=False, height_ratios=counts)[:, 0]
    for axis, model in zip(axes, models, strict=True):
        _draw_methods(axis, [row for row in rows if row["model"] == model])
        axis.set_title(model, loc="left", fontsize=10)
    axes[-1].set_xlabel("seconds per iteration: computation, and exposed communication")
    return figure


def _draw_methods(axis: Axes, rows: Rows) -> None:
    names = [row["method"] for row in rows]
    exposed = [max(row["exposed_seconds"] or 0.0, 0.0) for row in rows]
    hidden = [row["iteration_seconds"] - late for row, late in zip(rows, exposed, strict=True)]
    axis.barh(names, hidden, color=_BASE)
    colours = [_OURS if name.startswith("penstock") else _EXPOSED for name in names]
    axis.barh(names, exposed, left=hidden, color=colours, xerr=[row["spread"] / 2 for row in rows], ecolor="#4a5568")
    axis.invert_yaxis()
    _tidy(axis)


def draw_replay(rows: Rows) -> Figure:
    """Draw measured against simulated iterations; on the diagonal the simulation is right."""
    places = list(dict.fromkeys((row["hosts"], row["rate"]) for row in rows))
    figure = Figure(figsize=(4.8 * len(places), 4.6), layout="constrained")
    axes = figure.subplots(1, len(places), squeeze=False)[0]
    for axis, (hosts, rate) in zip(axes, places, strict=True):
        here = [row for row in rows if (row["hosts"], row["rate"]) == (hosts, rate)]
        for name, marker in zip(dict.fromkeys(row["how"] for row in here), "osv*^PD", strict=False):
            mine = [row for row in here if row["how"] == name]
            points = [[row[key] for row in mine] for key in ("simulated_seconds", "measured_seconds")]
            axis.scatter(*points, marker=marker, label=name, alpha=0.8)
        _draw_diagonal(axis, max(max(row["simulated_seconds"], row["measured_seconds"]) for row in here))
        axis.set_title(f"{hosts} hosts at {rate}", loc="left", fontsize=10)
        axis.set_xlabel("simulated (s)")
    axes[0].set_ylabel("measured (s)")
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def _draw_diagonal(axis: Axes, largest: float) -> None:
    ends = [0.0, 1.1 * largest]
    axis.plot(ends, ends, color="#4a5568", linewidth=1)
    axis.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="#e2e8f0", zorder=0)
    _tidy(axis)


def draw_collectives(rows: Rows) -> Figure:
    """Draw time against size, a panel per operation and number of hosts."""
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    hosts = sorted({row["hosts"] for row in rows})
    figure = Figure(figsize=(4.4 * len(operations), 3.6 * len(hosts)), layout="constrained")
    axes = figure.subplots(len(hosts), len(operations), squeeze=False)
    for i, count in enumerate(hosts):
        for j, operation in enumerate(operations):
            here = [row for row in rows if (row["hosts"], row["operation"]) == (count, operation)]
            _draw_sizes(axes[i][j], here)
            axes[i][j].set_title(f"{operation}, {count} hosts", loc="left", fontsize=10)
    return figure


def _draw_sizes(axis: Axes, rows: Rows) -> None:
    kinds = dict.fromkeys((row["engine"], row["strategy"], row["rate"]) for row in rows)
    for engine, strategy, rate in kinds:
        mine = _least_disturbed(
            [row for row in rows if (row["engine"], row["strategy"], row["rate"]) == (engine, strategy, rate)]
        )
        style = "--" if strategy == "native" else "-"
        sizes, times = [row["nbytes"] / 1e6 for row in mine], [1e3 * row["seconds"] for row in mine]
        axis.plot(sizes, times, style, marker=".", label=f"{engine} {strategy}, {rate}")
    _logarithmic(axis, "MB", "ms")


def _least_disturbed(rows: Rows) -> list[Row]:
    """Return one row per size, in order: of several records the one during which others used the machine least."""
    best: dict[float, Row] = {}
    for row in sorted(rows, key=lambda one: float(one.get("others") or 0.0), reverse=True):
        best[float(row["nbytes"])] = row
    return [best[size] for size in sorted(best)]


def draw_scaling(rows: Rows) -> Figure:
    """Draw measured and simulated times against the number of hosts."""
    return _draw_against(rows, "hosts", "emulated hosts")


def draw_rates(rows: Rows) -> Figure:
    """Draw measured and simulated times against the rate."""
    return _draw_against(rows, "rate", "rate of each NIC")


def _draw_against(rows: Rows, name: str, label: str) -> Figure:
    subjects = list(dict.fromkeys(row["what"] for row in rows))
    figure = Figure(figsize=(5.2 * len(subjects), 3.8), layout="constrained")
    for axis, subject in zip(figure.subplots(1, len(subjects), squeeze=False)[0], subjects, strict=True):
        here = [row for row in rows if row["what"] == subject]
        for index, how in enumerate(dict.fromkeys(row["how"] for row in here)):
            mine = [row for row in here if row["how"] == how]
            places = [str(row[name]) for row in mine]
            axis.plot(places, [row["measured_seconds"] for row in mine], color=f"C{index}", marker="o", label=how)
            axis.plot(places, [row["simulated_seconds"] for row in mine], color=f"C{index}", linestyle=":")
        axis.set_title(f"{subject} (dotted: simulated)", loc="left", fontsize=10)
        axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.set_ylabel("seconds")
        axis.legend(frameon=False, fontsize=9)
        _tidy(axis)
    return figure


def _logarithmic(axis: Axes, x: str, y: str) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.legend(frameon=False, fontsize=7)
    _tidy(axis)


def _tidy(axis: Axes) -> None:
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


PICTURES: dict[str, Callable[[Rows], Figure]] = {
    "train": draw_train,
    "replay": draw_replay,
    "collectives": draw_collectives,
    "scaling": draw_scaling,
    "rates": draw_rates,
}


def draw_time_to_loss(records: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Draw held-out loss against seconds of training for every method, a panel for each record; return the path."""
    figure = Figure(figsize=(5.5 * len(records), 4.2), layout="constrained")
    colours: dict[str, str] = {}  # of a method, the same in all panels
    for axes, record in zip(figure.subplots(1, len(records), squeeze=False)[0], records, strict=True):
        for row in record["rows"]:
            colour = colours.setdefault(row["method"], f"C{len(colours)}")
            seconds, losses = ([point[at] for point in row["curve"]] for at in (1, 2))
            axes.plot(seconds, losses, label=row["method"], color=colour)
        axes.set_xlabel("seconds of training, start-up and measuring included")
        axes.set_ylabel("held-out bits per byte")
        rate = record["rate"].replace("gbit", " Gb/s")
        axes.set_title(f"{record['hosts']} emulated hosts at {rate}, {record['steps']} steps")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    path = folder / "time-to-loss.png"
    figure.savefig(path, dpi=130)
    return path
