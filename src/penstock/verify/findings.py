"""What a proof can find wrong with a program, each with a name."""

from dataclasses import dataclass
from enum import Enum

from penstock.program import Instruction, Program


class Kind(Enum):
    """The name of a mistake."""

    MALFORMED = "malformed instruction"  # a slice or peer is missing or too much
    OUT_OF_BOUNDS = "slice out of bounds"
    UNKNOWN_BUFFER = "unknown buffer"
    UNKNOWN_RANK = "unknown rank"
    SELF_MESSAGE = "message to itself"
    LATER_DEPENDENCY = "dependency on a later instruction"
    UNEVEN_OPERANDS = "operands of different size"
    ENCODING = "dense and encoded mixed up"
    UNMATCHED_SEND = "unmatched send"
    UNMATCHED_RECV = "unmatched recv"
    UNMATCHED_NATIVE = "unmatched native call"
    SIZE_MISMATCH = "message size mismatch"
    MISORDERED = "misordered messages"
    RACE = "race"
    DEADLOCK = "deadlock"
    READ_BEFORE_WRITE = "read before write"
    DOUBLED = "doubled contribution"
    MISSING = "missing contribution"
    FOREIGN = "foreign contribution"  # one that the collective does not ask for
    OVERWRITTEN = "overwritten contribution"
    WRONG_ELEMENT = "wrong element"
    LOST = "values kept by no rank"  # what a merge of encoded blocks drops
    KEPT_TWICE = "values kept twice"
    CUT_ENCODING = "encoding cut in pieces"
    DIFFERENT_SUMS = "different order of summation"  # ranks would end with different bits


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake and where it is."""

    kind: Kind
    rank: int
    index: int | None  # of the instruction, where one is to blame
    step: int | None  # of the time step, where the program got so far as to have one
    detail: str

    def __str__(self) -> str:
        where = f"rank {self.rank}"
        where += "" if self.index is None else f", instruction {self.index}"
        where += "" if self.step is None else f", step {self.step}"
        return f"{self.kind.value}: {where}: {self.detail}"


def blame(program: Program, kind: Kind, rank: int, index: int, detail: str, step: int | None = None) -> Finding:
    """Return the finding against one instruction, which it quotes."""
    return Finding(kind, rank, index, step, f"`{quote(program.ranks[rank][index])}` {detail}")


def quote(instruction: Instruction) -> str:
    """Return the instruction on one line, without padding and dependencies."""
    return " ".join(str(instruction).split(" (")[0].split())
