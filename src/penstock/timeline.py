"""A `Timeline`: who did what from when to when, predicted or measured.

The same value comes out of the simulator and of a real run, so both can be laid over one another. Lanes are named
`compute`, `network`, `push`, `pull`, `computation`, `communication`, ... and belong to a rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import PlanError
from penstock.fields import Fields

COMPUTE = "compute"  # the lane of the model's own computation: all others are about messages
COMPUTATION, COMMUNICATION = "computation", "communication"  # what messages take of a rank: encoding, sending, ...
LANES = (COMPUTE, "network", "push", "pull", COMPUTATION, COMMUNICATION)  # in pictures from the top; others below
BUCKET_ENDS = ": "  # in the name of an instruction's span


def bucket_of(span_name: str) -> str:
    """Return the bucket that a span is about: `name: send to 2` is about `name`."""
    return span_name.split(BUCKET_ENDS, 1)[0]


@dataclass(frozen=True, slots=True)
class Span:
    """One thing done in one lane."""

    name: str
    lane: str
    start_seconds: float
    end_seconds: float
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start_seconds <= self.end_seconds < float("inf"):
            found = f"{self.start_seconds}..{self.end_seconds}"
            raise PlanError(f"span {self.name!r} runs from {found}; wanted 0 <= start <= end, finite")

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one iteration, counted from the start of its forward pass."""

    spans: tuple[Span, ...]

    @property
    def iteration_seconds(self) -> float:
        """When the last span ends."""
        return max((span.end_seconds for span in self.spans), default=0.0)

    @property
    def compute_seconds(self) -> float:
        """When the last computation ends: what the iteration would take with free communication."""
        return max((span.end_seconds for span in self.spans if span.lane == COMPUTE), default=0.0)

    @property
    def non_overlapped_seconds(self) -> float:
        """Communication that no computation hides (`t_c^no` of MG-WFBP)."""
        return self.iteration_seconds - self.compute_seconds

    def lane(self, name: str) -> tuple[Span, ...]:
        """Return the spans of one lane in the order they start."""
        return tuple(sorted((span for span in self.spans if span.lane == name), key=lambda span: span.start_seconds))

    @property
    def rows(self) -> dict[tuple[int, str], tuple[Span, ...]]:
        """The spans by rank and lane: rank by rank, lanes in the order of `LANES`, each as it starts."""
        found: dict[tuple[int, str], list[Span]] = {}
        for span in sorted(self.spans, key=lambda span: (span.rank, _place(span.lane), span.start_seconds)):
            found.setdefault((span.rank, span.lane), []).append(span)
        return {row: tuple(spans) for row, spans in found.items()}


def _place(lane: str) -> tuple[int, str]:
    """Return what lanes are sorted by: those that are not known stand below the others, by name."""
    return (LANES.index(lane), "") if lane in LANES else (len(LANES), lane)


def in_turn(spans: Iterable[Span]) -> list[Span]:
    """Return instructions one at a time in each lane of each rank, in the order in which they end.

    Messages are in flight together. A lane shows one span at a time, so that a message's begins when the one before it
    in its lane has ended:

        a  |------|           a  |------|
        b   |---------|       b         |---|
    """
    free: dict[tuple[int, str], float] = {}  # when each lane's last span ended
    found = []
    for span in sorted(spans, key=lambda span: span.end_seconds):
        row = span.rank, span.lane
        found.append(replace(span, start_seconds=max(span.start_seconds, free.get(row, 0.0))))
        free[row] = span.end_seconds
    return found


def timeline_from_fields(spans: "list[Fields] | tuple[Fields, ...]") -> Timeline:
    """Build a timeline from the objects of a plan file's `timeline` list."""
    return Timeline(tuple(_span(fields) for fields in spans))


def _span(fields: Fields) -> Span:
    start, end = fields.amount("start_seconds"), fields.amount("end_seconds")
    if end < start:
        raise fields.error("end_seconds", f"a time not before start_seconds ({start})")
    return Span(fields.text("name"), fields.text("lane"), start, end, fields.integer("rank", 0, 0))


def timeline_document(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the timeline as the `timeline` list of a plan file."""
    return [
        {
            "name": span.name,
            "lane": span.lane,
            "start_seconds": span.start_seconds,
            "end_seconds": span.end_seconds,
            "rank": span.rank,
        }
        for span in timeline.spans
    ]
