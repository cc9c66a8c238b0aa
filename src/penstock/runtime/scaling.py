"""When the data of a call are multiplied by its scale: where an instruction reads them anyway.

Usually at their first touch. Where that adds a decoded block, to be encoded later, as in a ring, they can wait for the
encode, which multiplies in its own pass: until then what is added is divided instead, in the pass that decodes it.

    scale (data + decoded / scale) = scale data + decoded

With a scale that is a power of two, as 1 / 4, both sides are the same to the bit, and only then is that done.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.program import DATA, Instruction, Op

Positions = Mapping[int, frozenset[int]]  # by the index of an instruction: positions of `data`


@dataclass(frozen=True, slots=True)
class Scaling:
    """Which instructions multiply which positions of `data`, and which add to some that are not multiplied yet."""

    at: Positions = field(default_factory=dict)
    before: Positions = field(default_factory=dict)


def at_first_touch(instructions: Sequence[Instruction]) -> Scaling:
    """Multiply every position where it is read or written first."""
    touches = _touches(instructions)
    return Scaling(_by_instruction([(indices[0], position) for position, indices in touches.items()]))


def at_encodes(instructions: Sequence[Instruction]) -> Scaling:
    """Let positions that are only added to before they are encoded wait for that; all others as at first touch."""
    at, before = [], []
    for position, indices in _touches(instructions).items():
        adds = _leading_adds(instructions, indices)
        at.append((indices[len(adds)], position))
        before += [(index, position) for index in adds]
    return Scaling(_by_instruction(at), _by_instruction(before))


def is_power_of_two(scale: float) -> bool:
    """Say whether multiplying and dividing by a scale rounds nothing.

    >>> [is_power_of_two(scale) for scale in (1 / 4, 1 / 3, 8.0)]
    [True, False, True]
    """
    return math.frexp(scale)[0] == 0.5


def _leading_adds(instructions: Sequence[Instruction], indices: Sequence[int]) -> list[int]:
    """Return the additions to a position before its only encode, where nothing else comes before that."""
    ops = [instructions[index].op for index in indices]
    if ops.count(Op.ENCODE) != 1:
        return []
    encode = ops.index(Op.ENCODE)
    waits = all(op is Op.MERGE for op in ops[:encode]) and all(op is Op.DECODE for op in ops[encode + 1 :])
    return list(indices[:encode]) if waits else []


def _touches(instructions: Sequence[Instruction]) -> dict[int, list[int]]:
    """Return, by position of `data`, the indices of the instructions that read or write it."""
    found = defaultdict(list)
    for index, one in enumerate(instructions):
        slices = [each for each in (one.read, one.write) if each is not None and each.buffer == DATA]
        for position in sorted({place for each in slices for place in range(each.start, each.stop)}):
            found[position].append(index)
    return found


def _by_instruction(pairs: Sequence[tuple[int, int]]) -> Positions:
    found = defaultdict(set)
    for index, position in pairs:
        found[index].add(position)
    return {index: frozenset(positions) for index, positions in found.items()}
