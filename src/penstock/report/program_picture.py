"""Draws a program as a picture: steps to the right, ranks downwards, an arrow per message (Wang et al., Fig. 2)."""

import os

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.errors import StrategyError
from penstock.program import Program
from penstock.report.pictures import save_figure
from penstock.report.program_text import BlockLabels
from penstock.verify import Carried, Proof

matplotlib.use("Agg")  # files only: no window, no display needed

MAX_MESSAGES = 4000  # more arrows than this are a grey surface, and take minutes


def draw_program(program: Program, proof: Proof, path: str | os.PathLike[str]) -> None:
    """Draw all messages of `proof`; filled labels are finished sums, the colour tells the block."""
    if len(proof.carried) > MAX_MESSAGES:
        raise StrategyError(
            f"{len(proof.carried)} messages are too many for a picture; wanted at most {MAX_MESSAGES}: "
            "take fewer workers, fewer elements or larger blocks"
        )
    width, height = 1.6 + 0.62 * max(proof.steps, 3), 1.3 + 0.62 * program.world_size
    figure = Figure(figsize=(min(width, 60), min(height, 40)), layout="constrained")
    axis = figure.subplots()
    _draw_frame(axis, program, proof)
    labels = BlockLabels(program, proof.carried)
    for message in proof.carried:
        _draw_message(axis, message, labels)
    save_figure(figure, path)


def _draw_frame(axis: Axes, program: Program, proof: Proof) -> None:
    """Draw a line of time for every rank and a light band for every second step."""
    for step in range(0, proof.steps, 2):
        axis.axvspan(step, step + 1, color="#f3f3f3", linewidth=0, zorder=0)
    for rank in range(program.world_size):
        axis.plot([0, max(proof.steps, 1)], [rank, rank], color="#c8c8c8", linewidth=1, zorder=1)
    axis.set_xlim(-0.05, max(proof.steps, 1) + 0.05)
    axis.set_ylim(program.world_size - 0.5, -0.5)
    axis.set_xticks([step + 0.5 for step in range(proof.steps)], [str(step + 1) for step in range(proof.steps)])
    axis.set_yticks(range(program.world_size), [f"rank {rank}" for rank in range(program.world_size)])
    axis.tick_params(length=0, labelsize=9)
    axis.spines[:].set_visible(False)
    axis.set_xlabel("step", fontsize=9)
    name = f"{program.collective.value} by {program.strategy}, {program.world_size} ranks, {program.numel} elements"
    axis.set_title(f"{name}: {proof.steps} steps, {len(proof.carried)} messages", loc="left", fontsize=10)


def _draw_message(axis: Axes, message: Carried, labels: BlockLabels) -> None:
    """Draw an arrow over the step, and near its tail the block that it carries."""
    colour = matplotlib.colormaps["turbo"](0.08 + 0.84 * labels.first(message) / max(labels.count - 1, 1))
    tail, head = (message.step - 0.94, message.source), (message.step - 0.06, message.target)
    arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 1, "mutation_scale": 9}
    axis.annotate("", head, tail, arrowprops=arrow, zorder=2)
    finished = labels.finished(message)
    box = {"boxstyle": "round,pad=0.18", "facecolor": colour if finished else "white", "edgecolor": colour}
    share = 0.3 / abs(message.target - message.source)  # near the sender's line, where no other label can be
    spot = (tail[0] + share * (head[0] - tail[0]), tail[1] + share * (head[1] - tail[1]))
    ink = _ink(colour) if finished else "black"
    axis.text(*spot, labels.label(message), ha="center", va="center", fontsize=7, color=ink, bbox=box, zorder=3)


def _ink(colour: tuple[float, float, float, float]) -> str:
    """Return black or white, whichever reads better on `colour`."""
    red, green, blue, _ = colour
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"
