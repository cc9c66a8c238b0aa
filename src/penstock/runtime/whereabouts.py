"""After a message did not come: ask the other ranks which call they are in, and say so where it is another one.

Calls that were compared once carry no more than a tag, so ranks that make different ones exchange nothing and run
into the timeout. Then every rank leaves a note saying where it is, and reads the others'. Nothing is written or read
while all goes well.
"""

from time import monotonic

from penstock.errors import TransportError
from penstock.program import Program
from penstock.runtime.transport import DeathError, Notes, Transport

LONGEST_SECONDS = 2.0  # for reading notes after a message was waited for in vain
BROKEN_SECONDS = 0.5  # for reading them after a connection broke: the others fail at the same moment, or are gone
SHARE = 0.1  # of the timeout, for reading notes


def asking_seconds(timeout_seconds: float) -> float:
    """Return how much of the timeout is kept for reading notes."""
    return min(LONGEST_SECONDS, SHARE * timeout_seconds)


def describe(call: int, program: Program, dtype: str, digest: str) -> str:
    """Return a note: which call this is, for people, and the program's fingerprint."""
    what = f"{program.collective.value} by {program.strategy} of {program.numel} {dtype}"
    return f"call {call}, {what} (program {digest[:8]})"


def explained(error: TransportError, transport: Transport, mine: str, timeout_seconds: float) -> TransportError:
    """Return the error, with both calls named where another rank is in a different one."""
    if not isinstance(transport, Notes) or isinstance(error.__cause__, DeathError):
        return error
    broken = isinstance(error.__cause__, ConnectionError)
    deadline = monotonic() + min(asking_seconds(timeout_seconds), BROKEN_SECONDS if broken else LONGEST_SECONDS)
    transport.leave_note(mine)
    for peer in sorted({*range(transport.world_size)} - {transport.rank}, key=lambda one: one != error.peer):
        theirs = transport.read_note(peer, max(0.0, deadline - monotonic()))
        if theirs not in (None, mine):
            cause = f"rank {peer} is in {theirs}; this rank is in {mine}; all ranks must make the same calls in order"
            return TransportError(error.strategy, error.rank, error.step, error.peer, cause)
    return error
