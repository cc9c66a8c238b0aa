"""What this machine can do and what it lacks: `penstock doctor` runs the checks, each of which returns `Finding`s."""

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """What a check found."""

    WORKS = "works"
    MISSING = "missing"  # optional: some part of penstock cannot be used without it
    BROKEN = "broken"  # it is there and does not work, or nothing works without it


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    state: State
    found: str  # what was seen, in words
    remedy: str = ""  # how to get what is not there; empty where it works


def works(name: str, found: str) -> Finding:
    """Return that something works."""
    return Finding(name, State.WORKS, found)


def missing(name: str, found: str, remedy: str) -> Finding:
    """Return that something optional is not there."""
    return Finding(name, State.MISSING, found, remedy)


def broken(name: str, found: str, remedy: str) -> Finding:
    """Return that something does not work."""
    return Finding(name, State.BROKEN, found, remedy)
