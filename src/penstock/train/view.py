"""Shows a training job: a live panel on a terminal, plain lines elsewhere, JSON lines for programs.

All go to standard error but the JSON, which is the result.
"""

import json
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from penstock.errors import TrainError, printable
from penstock.train.events import Event

PLAIN_SECONDS = 2.0  # between lines where there is no terminal
BLOCKS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    """Something that is shown while a job runs."""

    def __call__(self, event: Event) -> None:
        """Show an event."""

    def close(self) -> None:
        """Stop showing."""


def make_view(title: str, as_json: bool) -> View:
    """Return the view that suits where the output goes."""
    if as_json:
        return JsonView()
    return LiveView(title) if sys.stderr.isatty() else PlainView(title)


class JsonView:
    """One JSON line per event on standard output; the last one holds the record."""

    def __call__(self, event: Event) -> None:
        """Print an event."""
        print(json.dumps(event.document(), allow_nan=False), flush=True)

    def close(self) -> None:
        """Nothing is open."""


class PlainView:
    """A line every few seconds."""

    def __init__(self, title: str) -> None:
        self._seen, self._last = Seen(), 0.0
        print(title, file=sys.stderr, flush=True)

    def __call__(self, event: Event) -> None:
        """Print a line where it is time, or where something other than steps happened."""
        self._seen.take(event)
        if event.kind == "ready":
            print(f"ready: {event.values['explain'].splitlines()[0]}", file=sys.stderr, flush=True)
        elif event.kind == "saved":
            print(f"saved {event.values['path']}", file=sys.stderr, flush=True)
        elif event.kind == "done" or (event.kind == "steps" and monotonic() - self._last > PLAIN_SECONDS):
            self._last = monotonic()
            line = "  ".join(f"{name} {words}" for name, words in self._seen.words().items())
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class LiveView:
    """A panel that changes in place."""

    def __init__(self, title: str) -> None:
        self._seen, self._title = Seen(), title
        console = Console(stderr=True)
        self._progress = Progress(TextColumn("steps"), BarColumn(), TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task("steps", total=None)
        self._live = Live(self._panel(), console=console, refresh_per_second=4)
        self._live.start()

    def __call__(self, event: Event) -> None:
        """Take an event into the panel."""
        self._seen.take(event)
        if event.kind == "saved":
            self._live.console.print(f"saved {event.values['path']}", markup=False)
        self._progress.update(self._task, total=self._seen.latest.get("steps"), completed=self._seen.step)
        self._live.update(self._panel())

    def _panel(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        for name, words in self._seen.words().items():
            table.add_row(Text(name, "dim"), Text(printable(words)))  # a checkpoint may have chosen them
        table.add_row(Text("loss so far", "dim"), sparkline(self._seen.losses))
        return Panel(Group(table, self._progress), title=Text(self._title), title_align="left", width=100)

    def close(self) -> None:
        """Leave the last panel on the screen."""
        self._live.stop()


def sparkline(values: list[float], width: int = 60) -> str:
    """Return a curve of block letters: the mean of each of up to `width` stretches.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


# What a viewer knows of a job: the latest of everything that its events said.


@dataclass(slots=True)
class Seen:
    """The newest values of all events."""

    metric_name: str = "metric"
    step: int = 0
    latest: dict[str, Any] = field(default_factory=dict)
    metric: float | None = None
    losses: list[float] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Take over what an event says."""
        self.step = max(self.step, event.step)
        if event.kind == "ready":
            self.metric_name = event.values["metric_name"]
        elif event.kind == "evaluated":
            self.metric = event.values["metric"]
        elif event.kind == "steps":
            self.latest = event.values
            if event.values["loss"] is not None:
                self.losses.append(event.values["loss"])

    def words(self) -> dict[str, str]:
        """Return everything in words, by its name, in the order in which it is shown."""
        latest = self.latest
        if not latest:
            return {"state": "starting workers, profiling, planning"}
        return {
            "step": f"{self.step} of {latest['steps']}, {latest['seconds']:.0f} s",
            "loss": number(latest["loss"]),
            self.metric_name: number(self.metric),
            "speed": f"{number(latest['samples_per_second'])} samples/s",
            "iteration": split_words(latest),
            "sent": traffic_words(latest["bytes_per_iteration"], latest["dense_bytes_per_iteration"]),
            "plan": latest["plan"],
        }


def number(value: float | None) -> str:
    """Return a number with four digits, or what stands for one that is not known or not finite."""
    return "-" if value is None else f"{value:.4g}"


def split_words(values: dict[str, Any]) -> str:
    """Return an iteration in milliseconds: the whole, and what it is made of."""
    whole, compute, hidden, exposed = (
        None if values[name] is None else round(1e3 * values[name])
        for name in ("iteration_seconds", "compute_seconds", "hidden_seconds", "exposed_seconds")
    )
    known = "?" if hidden is None else hidden
    return f"{whole} ms = {compute} compute + {exposed} exposed communication ({known} hidden)"


def traffic_words(sent: float | None, dense: float | None) -> str:
    """Return bytes per worker and iteration, and what they are to dense ones."""
    if sent is None:
        return "-"
    ratio = f", {dense / sent:.1f}x less than dense" if dense and sent and dense / sent >= 1.05 else ""
    return f"{sent / 1e6:.3g} MB per worker and iteration{ratio}"


# TensorBoard event files, where the optional package is installed.


SCALARS = (
    "loss", "samples_per_second", "iteration_seconds", "compute_seconds", "hidden_seconds", "exposed_seconds",
    "bytes_per_iteration",
)  # fmt: skip


class TensorBoard:
    """Writes what events say as scalars."""

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise TrainError(
                "--tensorboard needs the package tensorboard, which is not here; `pip install 'penstock[tensorboard]'`"
            ) from None
        self._writer: Any = SummaryWriter(folder)

    def __call__(self, event: Event) -> None:
        """Write the scalars of an event."""
        if event.kind == "evaluated" and event.values["metric"] is not None:
            self._writer.add_scalar("metric", event.values["metric"], event.step)
        if event.kind == "steps":
            for name in SCALARS:
                if event.values[name] is not None:
                    self._writer.add_scalar(name, event.values[name], event.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
