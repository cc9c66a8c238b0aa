"""Ctrl-C and the like as a wish: the step is finished, the checkpoint written, and then the job ends."""

import signal
from types import FrameType

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
