"""Draws timelines and scaling curves with matplotlib."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.cost.clusters import CLUSTERS
from penstock.cost.papers import with_published_double_tree
from penstock.cost.ways import Way
from penstock.errors import FormatError
from penstock.network import LinearCost
from penstock.plan import Route, cut_into_buckets
from penstock.planners import PLANNERS
from penstock.report.run_plans import bucket_colours
from penstock.simulator.iteration import predict, simulate_iteration
from penstock.simulator.scaling import ScalingRow, scaling_study
from penstock.timeline import COMPUTE, Timeline, bucket_of
from penstock.trace import Tensor, Trace

matplotlib.use("Agg")  # files only: no window, no display needed

_COMPUTE_COLOURS = ("#6f7b87", "#b4bcc4")  # of tensors in turn
_STYLES = {
    "naive": ("#9d9d9d", ":"),
    "wfbp": ("#4c78a8", "--"),
    "single": ("#e45756", "--"),
    "threshold": ("#72b7b2", "-."),
    "greedy": ("#f58518", "-"),
    "exact": ("#2b2b2b", "-"),
}


def draw_timelines(timelines: Mapping[str, Timeline], path: str | os.PathLike[str], title: str) -> None:
    """Draw timelines one above the other on one time axis, as in MG-WFBP Fig. 1 and 2.

    A row for each lane of each rank; a bucket has one colour in all of them.
    """
    save_figure(timelines_figure(timelines, title), path)


def timelines_figure(timelines: Mapping[str, Timeline], title: str) -> Figure:
    """Return a figure with a panel for each timeline."""
    rows = [max(1, len(timeline.rows)) for timeline in timelines.values()]
    figure = Figure(figsize=(11, 1.0 + 0.55 * len(rows) + 0.28 * sum(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=[1 + each for each in rows])
    unit, scale = _unit(max(timeline.iteration_seconds for timeline in timelines.values()))
    colours = bucket_colours((), timelines.values())
    for axis, (name, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        _draw_rows(axis, timeline, colours, scale)
        axis.set_title(f"{name}: {timeline.iteration_seconds / scale:.4g} {unit}", loc="left", fontsize=9)
    panels[-1, 0].set_xlabel(f"time ({unit})")
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_rows(axis: Axes, timeline: Timeline, colours: Mapping[str, str], scale: float) -> None:
    rows = timeline.rows
    for place, ((_, lane), spans) in enumerate(rows.items()):
        bars = [(span.start_seconds / scale, span.seconds / scale) for span in spans]
        faces = [
            _COMPUTE_COLOURS[index % 2] if lane == COMPUTE else colours[bucket_of(span.name)]
            for index, span in enumerate(spans)
        ]
        axis.broken_barh(bars, (place - 0.4, 0.8), facecolors=faces, linewidth=0)
    axis.axvline(timeline.compute_seconds / scale, color="#2b2b2b", linewidth=0.8, linestyle=":")
    several = len({rank for rank, _ in rows}) > 1
    axis.set_yticks(range(len(rows)), [f"rank {rank} {lane}" if several else lane for rank, lane in rows], fontsize=8)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def draw_scaling(rows: Sequence[ScalingRow], path: str | os.PathLike[str], title: str) -> None:
    """Draw speed-up and efficiency against the number of workers, as in MG-WFBP Fig. 10 and 11."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    speed, efficiency = figure.subplots(1, 2)
    workers = sorted({row.workers for row in rows})
    speed.plot(workers, workers, color="#cccccc", linewidth=1, label="linear")
    for planner in dict.fromkeys(row.planner for row in rows):
        colour, style = _STYLES.get(planner, ("#b279a2", "-"))
        mine = sorted((row for row in rows if row.planner == planner), key=lambda row: row.workers)
        x = [row.workers for row in mine]
        speed.plot(x, [row.speedup for row in mine], style, color=colour, marker=".", label=planner)
        efficiency.plot(x, [100 * row.efficiency for row in mine], style, color=colour, marker=".", label=planner)
    for axis, label in ((speed, "speed-up over one worker"), (efficiency, "scaling efficiency (%)")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(workers, [str(p) for p in workers])
        axis.set_xlabel("workers")
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    speed.set_yscale("log", base=2)
    efficiency.set_ylim(0, 105)
    speed.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("us", 1e-6)


def save_figure(figure: Figure, path: str | os.PathLike[str], dpi: int = 150) -> None:
    """Write a figure to a file; the ending of its name says in which format."""
    try:
        figure.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        raise FormatError(
            str(path), "picture", str(error), "a path ending in .png, .svg or .pdf that can be written"
        ) from error


# MG-WFBP's Fig. 1, 2, 10 and 11, redrawn from our own simulations.


WORKERS = [2**exponent for exponent in range(2, 12)]
_WAY = Way("ring", (LinearCost(1.0e-3, 1.0e-9),))  # one startup is 1 ms, a megabyte 1 ms more


def draw_figures(folder: Path, scaling_trace: Trace) -> list[Path]:
    """Draw the four figures into `folder`; 10 and 11 scale `scaling_trace`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"mg-wfbp-fig{number}.png" for number in (1, 2, 10, 11)]
    draw_timelines(_figure_1(), paths[0], "Fig. 1: naive S-SGD, WFBP and SyncEASGD on a model of four layers")
    draw_timelines(_figure_2(), paths[1], "Fig. 2: when does merging layer l into l-1 pay? (startup 1 ms)")
    network = CLUSTERS["mg-wfbp-simulation"]
    planners = [PLANNERS[name] for name in ("wfbp", "single", "greedy", "exact")]
    title = f"Fig. {{}}: {scaling_trace.label}, {{}} all-reduce, simulated"
    by_ring = scaling_study(scaling_trace, network, WORKERS, planners, "ring")
    draw_scaling(by_ring, paths[2], title.format(10, "ring"))
    by_trees = [
        row
        for p in WORKERS
        if p >= 128
        for row in scaling_study(scaling_trace, with_published_double_tree(network, p), [p], planners, "double_tree")
    ]
    draw_scaling(by_trees, paths[3], title.format(11, "double_tree, as Table 2 has it,"))
    return paths


def _layers(*layers: tuple[float, float]) -> Trace:
    """Return a trace from (backward ms, megabytes) of each layer in ready order."""
    tensors = (Tensor(f"layer {len(layers) - i}", round(mb * 1e6 / 4), ms * 1e-3) for i, (ms, mb) in enumerate(layers))
    return Trace("layers", "paper", 1, "float32", 2e-3, tuple(tensors))


def _figure_1() -> dict[str, Timeline]:
    trace = _layers((2, 2), (1, 0.5), (1, 0.5), (2, 1))
    names = {"naive": "(a) naive S-SGD", "wfbp": "(b) WFBP", "single": "(c) SyncEASGD", "exact": "(d) the optimum"}
    return {title: predict(trace, PLANNERS[name], [_WAY], 4).timeline for name, title in names.items()}


def _figure_2() -> dict[str, Timeline]:
    """Each case once as it is and once with the last two layers merged."""
    cases = {
        "case 1, hidden": _layers((1, 1), (4, 1)),
        "case 2, merging saves": _layers((1, 1), (0.5, 1)),
        "case 3, merging waits too long": _layers((1, 1), (1.7, 1)),
        "case 4, the link is busy anyway": _layers((0.5, 3), (0.5, 1), (0.5, 1)),
    }
    found = {}
    for title, trace in cases.items():
        count = len(trace.tensors)
        for how, ends in (("as it is", list(range(count))), ("merged", [*range(count - 2), count - 1])):
            buckets = cut_into_buckets(trace, ends, [Route("ring")] * len(ends))
            found[f"{title}, {how}"] = simulate_iteration(trace, buckets, [_WAY])
    return found
