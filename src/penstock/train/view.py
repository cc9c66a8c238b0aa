"""Shows a training job: a live panel on a terminal, plain lines elsewhere, JSON lines for programs.

All go to standard error but the JSON, which is the result.
"""

import json
import sys
from itertools import pairwise
from time import monotonic
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock.train.events import Event
from penstock.train.state import Seen

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
            self._live.console.print(f"saved {event.values['path']}")
        self._progress.update(self._task, total=self._seen.latest.get("steps"), completed=self._seen.step)
        self._live.update(self._panel())

    def _panel(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        for name, words in self._seen.words().items():
            table.add_row(f"[dim]{name}[/dim]", words)
        table.add_row("[dim]loss so far[/dim]", sparkline(self._seen.losses))
        return Panel(Group(table, self._progress), title=self._title, title_align="left", width=100)

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
