"""The bytes that an operation of a codec cannot avoid moving, and how long a copy's bandwidth takes for them.

One pass over a gradient reads N bytes. An encode of p passes reads p N and writes its payload; error feedback reads the
residual and writes it too; a decode writes N, and with adding reads it first. A sparse codec that adds touches no more
than what was sent. A copy moves 2 N, so its time gives the bandwidth: floor = copy time * moved / 2 N.

>>> floor_seconds(moved_nbytes=3_000, nbytes=1_000, copy_seconds=0.5)
0.75
"""

from penstock.compll.ir import Program
from penstock.compll.lower.fuse import schedule_decode, schedule_encode
from penstock.compll.lower.passes import Pass, Scatter


def moved_nbytes(program: Program, operation: str, nbytes: int, payload_nbytes: int) -> int:
    """Return the fewest bytes that an operation on a gradient of `nbytes` reads and writes."""
    passes = int(schedule_encode(program).passes())  # top-k's 1.1 counts its sample, which is no need of the problem
    scatters = any(
        isinstance(output, Scatter)
        for step in schedule_decode(program).steps
        if isinstance(step, Pass)
        for output in step.outputs
    )
    moved = {
        "encode": passes * nbytes + payload_nbytes,
        "encode_feedback": (passes + 2) * nbytes + 2 * payload_nbytes,
        "decode": nbytes + payload_nbytes,
        "decode_add": 2 * payload_nbytes if scatters else 2 * nbytes + payload_nbytes,
        "topk": nbytes,
    }
    return moved[operation]


def floor_seconds(moved_nbytes: int, nbytes: int, copy_seconds: float) -> float:
    """Return the time that moving so many bytes takes at the bandwidth of a copy of `nbytes`."""
    return copy_seconds * moved_nbytes / (2 * nbytes)
