"""How much longer messages take while the same cores compute, from iterations that were profiled anyway.

The network is measured while nothing computes. Profiled iterations send torch's own buckets while they compute, and
what is left to send after that says how far messages came meanwhile. Let bucket i be ready at r_i, let it and all
after it take S_i where nothing computes, and let the backward pass end at T. With a slowdown of s messages last until
max_i (T - (T - r_i) / s + S_i) (`simulator/shared_cores.py`). They lasted until E: s is the least of
(T - r_i) / (S_i - (E - T)): what bucket i and those after it did of their S_i in the T - r_i before T.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

from penstock.network import LinearCost
from penstock.timeline import Timeline
from penstock.trace import Trace

ABOUT = 1.05  # times as long is as predicted
MOST = 4.0  # more is not sharing cores: ranks that wait for a slower one, or a hiccup


@dataclass(slots=True)
class Sending:
    """What profiled iterations sent while they computed, and when the last of it had arrived."""

    nbytes: tuple[int, ...] = ()  # of torch's buckets, in sending order
    ends: list[float] = field(default_factory=list)  # seconds, of each iteration that sent these

    def note(self, data: Mapping[str, Any], timeline: Timeline | None) -> None:
        """Take an iteration from torch's logging data; torch changes its buckets once, after the first."""
        nbytes = bucket_nbytes(data)
        if timeline is None or not nbytes:
            return
        if nbytes != self.nbytes:
            self.nbytes, self.ends = nbytes, []
        self.ends.append(timeline.iteration_seconds)

    def slowdown(self, trace: Trace, line: LinearCost | None) -> float:
        """Return how much longer messages take meanwhile; 1 where nothing is known, or nothing is in their way.

        `line` is what an all-reduce takes where nothing computes.
        """
        if line is None or not self.ends:
            return 1.0
        return message_slowdown(trace, self.nbytes, line, median(self.ends))


def bucket_nbytes(data: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sizes of torch's buckets.

    >>> bucket_nbytes({"bucket_sizes": "30", "rebuilt_bucket_sizes": "10, 20"})
    (10, 20)
    """
    text = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return tuple(int(part) for part in text.split(",") if part.strip())


def message_slowdown(trace: Trace, nbytes: Sequence[int], line: LinearCost, end_seconds: float) -> float:
    """Return the slowdown with which buckets of `nbytes` have arrived at `end_seconds`, between 1 and `MOST`.

    It is 1 where that ends about as late: of messages that are covered anyway, a little noise would make anything.
    """
    computed, ready = trace.compute_seconds, _bucket_ready(trace, nbytes)
    rest = [*accumulate(line.seconds(each) for each in reversed(nbytes))][::-1]  # a bucket and all after it
    if end_seconds <= ABOUT * max(computed, *(r + s for r, s in zip(ready, rest, strict=True))):
        return 1.0
    done = [(computed - r, s - (end_seconds - computed)) for r, s in zip(ready, rest, strict=True)]
    found = min((time / part for time, part in done if part > 0), default=MOST)
    return min(max(1.0, found), MOST)


def _bucket_ready(trace: Trace, nbytes: Sequence[int]) -> list[float]:
    """Return when the last gradient of each bucket is ready; buckets hold tensors in the trace's order."""
    ends, ready = list(accumulate(trace.nbytes)), trace.ready_seconds
    return [ready[min(bisect_left(ends, end), len(ready) - 1)] for end in accumulate(nbytes)]
