"""Draws timelines and scaling curves with matplotlib."""

import os
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.errors import FormatError
from penstock.simulator.scaling import ScalingRow
from penstock.timeline import COMPUTE, Timeline

matplotlib.use("Agg")  # files only: no window, no display needed

_LANE_COLOURS = {COMPUTE: ("#4c78a8", "#9ecae9"), "network": ("#f58518", "#ffbf79")}
_OTHER_COLOURS = ("#54a24b", "#88d27a")
_STYLES = {
    "naive": ("#9d9d9d", ":"),
    "wfbp": ("#4c78a8", "--"),
    "single": ("#e45756", "--"),
    "threshold": ("#72b7b2", "-."),
    "greedy": ("#f58518", "-"),
    "exact": ("#2b2b2b", "-"),
}


def draw_timelines(timelines: Mapping[str, Timeline], path: str | os.PathLike[str], title: str) -> None:
    """Draw timelines one above the other on one time axis, as in MG-WFBP Fig. 1 and 2."""
    figure = Figure(figsize=(11, 1.0 + 1.1 * len(timelines)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    unit, scale = _unit(max(timeline.iteration_seconds for timeline in timelines.values()))
    for axis, (name, timeline) in zip(axes, timelines.items(), strict=True):
        _draw_lanes(axis, timeline, scale)
        axis.set_title(f"{name}: {timeline.iteration_seconds / scale:.4g} {unit}", loc="left", fontsize=9)
    axes[-1].set_xlabel(f"time ({unit})")
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _draw_lanes(axis: Axes, timeline: Timeline, scale: float) -> None:
    lanes = list(dict.fromkeys(span.lane for span in timeline.spans))
    for row, lane in enumerate(lanes):
        colours = _LANE_COLOURS.get(lane, _OTHER_COLOURS)
        spans = timeline.lane(lane)
        bars = [(span.start_seconds / scale, span.seconds / scale) for span in spans]
        axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=[colours[i % 2] for i in range(len(bars))], linewidth=0)
    axis.axvline(timeline.compute_seconds / scale, color="#2b2b2b", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(lanes)), lanes)
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
