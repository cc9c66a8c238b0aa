"""Where the lines that workers print go."""

import sys
from collections import defaultdict, deque

from penstock.cluster.launch import Sink

KEPT_LINES = 20


def print_prefixed(rank: int, stream: str, line: str) -> None:
    """Print a line to the same stream here, with its rank before it."""
    _print(stream, f"[{rank}] {line}")


def print_plain(rank: int, stream: str, line: str) -> None:
    """Print a line to the same stream here, as it is."""
    _print(stream, line)


class RankZero:
    """Prints rank 0's lines as they are and keeps the others' last ones, to explain a failure."""

    def __init__(self) -> None:
        self.kept: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Take one line."""
        if rank == 0:
            _print(stream, line)
        else:
            self.kept[rank].append(line)

    def explain(self, failed_rank: int | None) -> None:
        """Print the last lines of the rank that failed on standard error; of all where that is not known."""
        for rank in sorted(self.kept) if failed_rank is None else [failed_rank]:
            for line in self.kept[rank]:
                print_prefixed(rank, "stderr", line)


class Collected:
    """Keeps every line, for programs that want the workers' output as text."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, str], list[str]] = defaultdict(list)

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Take one line."""
        self.lines[rank, stream].append(line)

    def text(self, rank: int, stream: str = "stdout") -> str:
        """Return what `rank` has printed."""
        return "".join(self.lines[rank, stream])


def on_stderr(sink: Sink) -> Sink:
    """Return a sink that prints all lines on standard error, where standard output is somebody else's."""
    return lambda rank, stream, line: sink(rank, "stderr", line)


def default_sink(workers: int) -> Sink:
    """Return plain output for one worker, prefixed lines for several."""
    return print_plain if workers == 1 else print_prefixed


def _print(stream: str, text: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(text)
    target.flush()
