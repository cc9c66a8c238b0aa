"""After a message did not come: ask the other ranks where they are, and say with whom it began.

A rank that cannot go on leaves a note (its call, for whom it waited), hangs up, so that all others fail now and
not one after the other, and reads their notes. Then two things can be told that no rank knows by itself:

- Ranks are in different calls. Calls that were compared once carry no more than a tag, so ranks that make different
  ones exchange nothing and run into the timeout.
- A rank left no note: it died, or hangs. Who waited for a survivor that gave up finds it by asking on: with four ranks
  in a ring and rank 1 dead, rank 3 waited for rank 2, which waited for rank 1.

Nothing is written or read while all goes well.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from time import monotonic

from penstock.errors import TransportError
from penstock.program import Part, Program
from penstock.runtime.transport import DeathError, Notes, Transport

LONGEST_SECONDS = 2.0  # for reading notes
SHARE = 0.1  # of the timeout, for reading notes
ENDED = "died, hangs, or has ended"  # what may have become of a silent rank: a connection was closed
CALLS = "calls (fewer batches, or no_sync on some ranks only)"
FEWER = f"died, hangs, has ended, or lives and makes fewer {CALLS}"
_TIMED_OUT = re.compile(r"timed? ?out|nothing for", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Note:
    """Where a rank was when its messages stopped."""

    call: int  # its number
    what: str  # the call in words; the program's fingerprint is at the end, once ranks have compared it
    peer: int | None = None  # whose message did not come; None in the engine's own collective
    group: str = ""  # which ranks' calls are counted; groups of the same ranks have numbers of their own
    timed_out: bool = False  # it waited until the timeout, and no connection was closed
    doing: str = ""  # what a collective of torch's own is for; ranks in the same call may be a step apart

    def __str__(self) -> str:
        """Return which call it is, for people."""
        return f"call {self.call}, {self.what}"

    def agrees_with(self, other: "Note") -> bool:
        """Say whether both may be the same call; one of the ranks may still be comparing programs."""
        alike = self.what.startswith(other.what) or other.what.startswith(self.what)
        return alike and self.call == other.call


def asking_seconds(timeout_seconds: float) -> float:
    """Return how much of the timeout is kept for reading notes."""
    return min(LONGEST_SECONDS, SHARE * timeout_seconds)


def describe(call: int, program: Part | Program, dtype: str, digest: str = "") -> Note:
    """Return a note: which call this is, for people, and the program's fingerprint, where ranks have compared it."""
    what = f"{program.collective.value} by {program.strategy} of {program.numel} {dtype}"
    return Note(call, f"{what} (program {digest[:8]})" if digest else what)


def explained(error: TransportError, transport: Transport, where: Note, timeout_seconds: float) -> TransportError:
    """Return the error with what the other ranks' notes say about it."""
    if not isinstance(transport, Notes) or isinstance(error.__cause__, DeathError):
        return error
    group, timed_out = where.group or getattr(transport, "group_name", ""), bool(_TIMED_OUT.search(error.cause))
    mine = replace(where, peer=error.peer, group=group, timed_out=timed_out)
    transport.leave_note(json.dumps(asdict(mine)))
    transport.hang_up()
    try:
        notes = _read_notes(transport, error.peer, asking_seconds(timeout_seconds))
    except ConnectionError as gone:
        return _because(error, f"{error.cause}; {gone}")
    return _because(error, diagnosis(transport.rank, mine, notes, error.cause))


def diagnosis(rank: int, mine: Note, notes: Mapping[int, Note | None], cause: str) -> str:
    """Return the cause, and what was found: ranks in different calls, or a rank that left no note.

    A different program under the same number is a mistake for certain. Under different numbers ranks may also be
    because some had less to do in a call that another rank's death broke off. A note of another group says only that
    its rank lives.
    """
    comparable = {peer: note for peer, note in notes.items() if note is not None and note.group == mine.group}
    different = [peer for peer, note in comparable.items() if not note.agrees_with(mine)]
    mistaken = [peer for peer in different if comparable[peer].call == mine.call]
    silent = began_with(rank, mine.peer, notes)
    for peer in mistaken or ([] if silent else different):
        return (
            f"rank {peer} is in {comparable[peer]}; this rank is in {mine}; all ranks must make the same calls in order"
        )
    if not silent:
        return f"{cause}{_elsewhere(mine, notes)}"
    timed_out = mine.timed_out or any(note is not None and note.timed_out for note in notes.values())
    when, fate = (" before the timeout", FEWER) if timed_out else ("", ENDED)
    known = f"it {fate}" if len(silent) == 1 else f"which of them {fate} cannot be told from here"
    return f"{cause}; {' and '.join(f'rank {peer}' for peer in silent)} did not answer{when}: {known}"


def _elsewhere(mine: Note, notes: Mapping[int, Note | None]) -> str:
    """Say what another rank did, where it was something else and all live."""
    for peer, note in notes.items():
        if note is not None and note.doing != mine.doing:
            return f"; all ranks live, rank {peer} in {note.doing or note.what}: some may make more or fewer {CALLS}"
    return ""


def began_with(rank: int, peer: int | None, notes: Mapping[int, Note | None]) -> list[int]:
    """Return the rank without a note that the chain of who waited for whom ends at, or else all without one."""
    seen = {rank}
    while peer is not None and peer not in seen:
        note = notes[peer]
        if note is None:
            return [peer]
        seen.add(peer)
        peer = note.peer
    return [other for other, note in notes.items() if note is None]


def _read_notes(transport: Notes, first: int | None, seconds: float) -> dict[int, Note | None]:
    """Return the notes of all other ranks, None where there is none in time."""
    deadline = monotonic() + seconds
    found: dict[int, Note | None] = {}
    others = {*range(transport.world_size)} - {transport.rank}  # type: ignore[attr-defined]  # it is a transport too
    for peer in sorted(others, key=lambda one: (one != first, one)):
        text = transport.read_note(peer, max(0.0, deadline - monotonic()))
        found[peer] = None if text is None else Note(**json.loads(text))
    transport.finish_reading([peer for peer, note in found.items() if note is not None], seconds)
    return found


def _because(error: TransportError, cause: str) -> TransportError:
    return TransportError(error.strategy, error.rank, error.step, error.peer, cause)
