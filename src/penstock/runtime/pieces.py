"""Which part of the data an action needs first, and which part is finished after it.

A tensor on a device is fetched to host memory in pieces and brought back in pieces, so that the first block travels
while the last is still being fetched. A piece must be here before the first action that touches it, and may go back
after the last that writes it:

    ring on 2 ranks, rank 0, chunks a and b:   fetch a, send a, recv b's rest, merge into b, send b (b goes back), ...
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.program import DATA, Instruction, Op, Slice
from penstock.runtime.schedule import Action, Do

LEAST_NUMEL = 64 * 1024  # elements of a piece: starting a copy takes as long as copying about this much


@dataclass(frozen=True, slots=True)
class Pieces:
    """The data of one rank in pieces, and when they are needed and finished; positions count actions."""

    bounds: tuple[tuple[int, int], ...]  # elements from..to, in the order of first use
    needed: dict[int, tuple[int, ...]]  # position of an action: the pieces that no action touched before it
    finished: dict[int, tuple[int, ...]]  # position of an action: the pieces that no action writes after it


def cut(instructions: Sequence[Instruction], actions: Sequence[Action], least_numel: int = LEAST_NUMEL) -> Pieces:
    """Cut what a rank touches of `data` where its slices begin and end, into pieces of at least `least_numel`."""
    edges = _edges(instructions, least_numel)
    first: dict[int, int] = {}  # piece: position of the first action that touches it
    last: dict[int, int] = {}  # piece: position of the action after which it has its final value
    for position, action in enumerate(actions):
        instruction = instructions[action.step]
        for slice_ in (instruction.read, instruction.write):
            for piece in _overlapped(edges, slice_):
                first.setdefault(piece, position)
        if _writes_now(action, instruction):
            last.update(dict.fromkeys(_overlapped(edges, instruction.write), position))
    number = {piece: index for index, piece in enumerate(first)}  # in the order of first use
    bounds = tuple((edges[piece], edges[piece + 1]) for piece in first)
    return Pieces(bounds, _grouped(first, number), _grouped(last, number))


def whole(numel: int, actions: Sequence[Action]) -> Pieces:
    """Take all data as one piece, where a program counts batches and not elements."""
    if not actions or not numel:
        return Pieces((), {}, {})
    return Pieces(((0, numel),), {0: (0,)}, {len(actions) - 1: (0,)})


def _edges(instructions: Sequence[Instruction], least_numel: int) -> list[int]:
    """Return where pieces begin, and where the last ends; edges too close to the one before are left out."""
    slices = [s for one in instructions for s in (one.read, one.write) if s is not None and s.buffer == DATA]
    if not slices:
        return []
    inner = sorted({edge for s in slices for edge in (s.start, s.stop)})
    edges = [inner[0]]
    for edge in inner[1:-1]:
        if edge - edges[-1] >= least_numel:
            edges.append(edge)
    return [*edges, inner[-1]]


def _overlapped(edges: Sequence[int], slice_: Slice | None) -> range:
    if slice_ is None or slice_.buffer != DATA or not slice_.numel:
        return range(0)
    return range(bisect_right(edges, slice_.start) - 1, bisect_left(edges, slice_.stop))


def _writes_now(action: Action, instruction: Instruction) -> bool:
    """Say whether the instruction's write is finished with this action: a receive's when it was waited for."""
    return action.do is Do.WAIT if instruction.op is Op.RECV else action.do in (Do.COMPUTE, Do.NATIVE)


def _grouped(positions: dict[int, int], number: dict[int, int]) -> dict[int, tuple[int, ...]]:
    """Turn piece -> position into position -> pieces, by their numbers."""
    found: dict[int, list[int]] = {}
    for piece, position in positions.items():
        found.setdefault(position, []).append(number[piece])
    return {position: tuple(sorted(pieces)) for position, pieces in found.items()}
