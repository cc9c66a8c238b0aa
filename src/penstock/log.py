"""What penstock says while it works: `logging.getLogger("penstock")`, on the first rank of a process group only.

Steps are told at INFO. What holds training up for more than `PATIENCE_SECONDS` is told at WARNING, which Python prints
to stderr in a program that configures no logging; `logging.getLogger("penstock").setLevel("ERROR")` silences it. There
is no handler of ours: a program's own configuration decides on everything else.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

LOG = logging.getLogger("penstock")
PATIENCE_SECONDS = 2.0  # that training may wait without a word
AGAIN_SECONDS = 15.0  # between two words about the same wait


class Voice:
    """What one rank says; ranks that do not speak do everything else alike."""

    def __init__(self, speaks: bool, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.speaks, self._patience = speaks, patience_seconds
        self.held_seconds = 0.0  # that training has waited so far, on this rank
        self._step = ""  # what training waits for now

    def say(self, text: str) -> None:
        """Tell something that takes no time."""
        if self.speaks:
            LOG.info(text)

    def warn(self, text: str) -> None:
        """Tell what a user should see without having configured anything."""
        if self.speaks:
            LOG.warning(text)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Tell what is done inside, before it, and afterwards how long it took."""
        before, self._step = self._step, what
        self.say(what)
        start = perf_counter()
        try:
            yield
            self.say(f"{what}: took {perf_counter() - start:.1f} s")
        finally:
            self._step = before

    @contextmanager
    def holding_up(self, what: str) -> Iterator[list[str]]:
        """Tell why training waits, once it has waited for longer than it may without a word, and when it goes on.

        What is put into the list that is yielded is told at the end, too: what came of it.
        """
        start, over, told, outcome = perf_counter(), threading.Event(), threading.Event(), list[str]()
        watch = threading.Thread(target=self._watch, args=(what, start, over, told), name="penstock-log", daemon=True)
        if self.speaks:
            watch.start()
        try:
            yield outcome
        finally:
            over.set()
            if self.speaks:
                watch.join()
            self._step = ""
            self.held_seconds += perf_counter() - start
        tell = self.warn if told.is_set() else self.say
        tell("; ".join([f"training goes on, {what} took {perf_counter() - start:.1f} s", *outcome]))

    def _watch(self, what: str, start: float, over: threading.Event, told: threading.Event) -> None:
        patience = self._patience
        while not over.wait(patience):
            told.set()
            step = f" ({self._step})" if self._step else ""
            self.warn(f"training waits for penstock: {what}{step}, {perf_counter() - start:.0f} s so far")
            patience = AGAIN_SECONDS

    def __reduce__(self) -> tuple[type["Voice"], tuple[bool, float]]:
        """Leave the step out: it belongs to this process."""
        return Voice, (self.speaks, self._patience)
