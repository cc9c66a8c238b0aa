"""Notes when each instruction of a running program starts and ends: what a picture of a real collective is made of.

    communicator.recorder = Recorder()
    communicator.all_reduce(gradient)
    communicator.recorder.timeline()  # spans of this rank in two lanes, computation and communication

The executor walks its actions through `Recorder.watch`, which looks at the clock between them; without a recorder it
walks them directly, so that recording costs nothing without one.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from penstock.program import Instruction, Op
from penstock.runtime.schedule import Action, Do
from penstock.timeline import COMMUNICATION, COMPUTATION, Span, Timeline, in_turn


@dataclass(frozen=True, slots=True)
class Note:
    """One instruction that was carried out; seconds on `time.perf_counter`'s clock."""

    bucket: str  # whose program it belongs to; empty where the caller did not say
    rank: int
    instruction: Instruction
    start_seconds: float  # when it was started; of a message: when it was handed to the engine
    end_seconds: float  # when it was known to be finished; of a message: when a wait for it had returned


class Recorder:
    """The notes of one rank's calls, until `clear`; calls of several threads may run at the same time."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self._at = threading.local()

    def clear(self) -> None:
        """Forget everything, as at the start of an iteration."""
        self.notes.clear()

    def name(self, bucket: str) -> None:
        """Say which bucket the next calls of this thread are about."""
        self._at.bucket = bucket

    def watch(self, rank: int, instructions: Sequence[Instruction], actions: Iterable[Action]) -> Iterator[Action]:
        """Yield the actions of one call and note what happens between them."""
        bucket: str = getattr(self._at, "bucket", "")
        started: dict[int, float] = {}  # of the messages in flight
        for action in actions:
            before = perf_counter()
            yield action
            if action.do in (Do.SEND, Do.RECV):
                started[action.step] = before
            else:
                start = started.pop(action.step, before)
                self.notes.append(Note(bucket, rank, instructions[action.step], start, perf_counter()))

    def timeline(self, origin_seconds: float | None = None) -> Timeline:
        """Return all notes as spans, from `origin_seconds` on `perf_counter`'s clock, or from the first note."""
        origin = (
            min((note.start_seconds for note in self.notes), default=0.0) if origin_seconds is None else origin_seconds
        )
        return Timeline(tuple(in_turn(_span(note, origin) for note in self.notes)))


def _span(note: Note, origin: float) -> Span:
    lane = COMMUNICATION if note.instruction.op in (Op.SEND, Op.RECV, Op.NATIVE) else COMPUTATION
    start, end = max(0.0, note.start_seconds - origin), max(0.0, note.end_seconds - origin)
    return Span(_name(note), lane, start, end, note.rank)


def _name(note: Note) -> str:
    """Return what a span says: the instruction, after its bucket where that is known.

    >>> _name(Note("bucket 3", 1, Instruction(Op.SEND, peer=2), 0.0, 1.0))
    'bucket 3: send to 2'
    """
    text = note.instruction.brief
    elements = note.instruction.write or note.instruction.read
    text += f" {elements}" if elements else ""
    return f"{note.bucket}: {text}" if note.bucket else text
