"""What a training job tells while it runs: reports of steps, evaluations, checkpoints and the end, as JSON lines.

Rank 0 tells. Where `penstock train` started the workers itself, the lines go to it through a pipe; what they become on
the screen is a matter of `view.py`.
"""

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

PREFIX = "penstock-train "  # of the lines that are events; everything else a worker prints is talk


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened."""

    kind: str  # "ready", "steps", "evaluated", "saved", "stopped", "failed" or "done"
    step: int
    values: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """Return the event as one flat JSON object."""
        return {"event": self.kind, "step": self.step, **self.values}


Tell = Callable[[Event], None]


def tell_launcher(event: Event) -> None:
    """Hand an event to the process that started this worker."""
    sys.stdout.write(PREFIX + json.dumps(asdict(event), allow_nan=False) + "\n")
    sys.stdout.flush()


def drop_event(event: Event) -> None:
    """Drop an event: ranks other than 0 report none."""


def event_from_line(line: str) -> Event | None:
    """Return the event of a line; None where it is none."""
    if not line.startswith(PREFIX):
        return None
    return Event(**json.loads(line.removeprefix(PREFIX)))


# Ctrl-C and the like as a wish: the step is finished, the checkpoint written, and then the job ends.


STOP = signal.SIGUSR1  # what a launcher sends its workers: mpirun passes it on, and a terminal never sends it
WISHES = (signal.SIGINT, signal.SIGTERM, STOP)
STOPPED = 130  # exit code after Ctrl-C, as shells have it


class Wish:
    """Counts requests to end this process."""

    def __init__(self) -> None:
        self.made = 0  # how often

    def listen(self) -> "Wish":
        """Take signals from now on."""
        for number in WISHES:
            signal.signal(number, self._take)
        return self

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.made += 1
