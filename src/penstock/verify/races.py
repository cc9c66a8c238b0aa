"""The third stage of a proof: no rank touches the same elements twice at once.

Sends and receives go on while later instructions are issued. Two of them that overlap in memory, one writing, must be
ordered by `after`, directly or through others; the list order alone is not enough.
"""

from collections.abc import Iterable

from penstock.program import Instruction, Program
from penstock.program.accesses import Accesses
from penstock.verify.findings import Finding, Kind, blame, quote


def find_races(program: Program) -> list[Finding]:
    """Return one finding per instruction that does not wait for one it conflicts with."""
    findings = []
    for rank, instructions in enumerate(program.ranks):
        accesses = Accesses()
        finished_before = _finished_before(instructions)
        for index, instruction in enumerate(instructions):
            rivals = [one for one in _conflicts(accesses, instruction, index) if not finished_before[index] >> one & 1]
            if rivals:
                detail = f"does not wait for instruction {rivals[0]}, `{quote(instructions[rivals[0]])}`"
                findings.append(blame(program, Kind.RACE, rank, index, detail))
    return findings


def _finished_before(instructions: Iterable[Instruction]) -> list[int]:
    """Return for each instruction the bit set of those that `after` puts before it."""
    sets: list[int] = []
    for instruction in instructions:
        earlier = 0
        for index in instruction.after:
            earlier |= sets[index] | 1 << index
        sets.append(earlier)
    return sets


def _conflicts(accesses: Accesses, instruction: Instruction, index: int) -> list[int]:
    """Note what an instruction touches; return the earlier ones it must wait for."""
    read, write = instruction.read, instruction.write
    found: set[int] = set()
    if read is not None:
        accesses.read(*read, index, found)
    if write is not None:
        accesses.write(*write, index, found)
    return sorted(found - {index})
