"""Ways to break a program, one instruction at a time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.program import Instruction, Op, Program, Slice


def with_rank(program: Program, rank: int, instructions: list[Instruction]) -> Program:
    ranks = list(program.ranks)
    ranks[rank] = tuple(instructions)
    return replace(program, ranks=tuple(ranks))


def change(program: Program, rank: int, index: int, **changes: Any) -> Program:
    instructions = list(program.ranks[rank])
    instructions[index] = instructions[index]._replace(**changes)
    return with_rank(program, rank, instructions)


def drop(program: Program, rank: int, index: int) -> Program:
    """Remove an instruction; whoever waited for it waits for what it waited for."""
    gone = program.ranks[rank][index]
    kept = [one for position, one in enumerate(program.ranks[rank]) if position != index]

    def renumbered(after: tuple[int, ...]) -> tuple[int, ...]:
        inherited = {*(one for one in after if one != index), *(gone.after if index in after else ())}
        return tuple(sorted(one - (one > index) for one in inherited))

    return with_rank(program, rank, [one._replace(after=renumbered(one.after)) for one in kept])


def duplicate(program: Program, rank: int, index: int) -> Program:
    """Do an instruction twice, the second time after the first."""
    instructions = list(program.ranks[rank])
    again = instructions[index]._replace(after=(index,))
    moved = [one._replace(after=_moved(one.after, index)) for one in instructions[index + 1 :]]
    return with_rank(program, rank, [*instructions[: index + 1], again, *moved])


def _moved(after: tuple[int, ...], index: int) -> tuple[int, ...]:
    """Renumber for an instruction inserted behind `index`, and wait for it wherever `index` is waited for."""
    return tuple(sorted({one + (one > index) for one in after} | ({index + 1} if index in after else set())))


def swap_operands(program: Program, rank: int, first: int, second: int) -> Program:
    """Exchange what two instructions read or write, leaving their places and dependencies."""
    one, other = program.ranks[rank][first], program.ranks[rank][second]
    swapped = change(program, rank, first, read=other.read, write=other.write)
    return change(swapped, rank, second, read=one.read, write=one.write)


def shifted(touched: Slice | None, by: int) -> Slice:
    assert touched is not None
    return Slice(touched.buffer, touched.start + by, touched.stop + by)


def find(program: Program, rank: int, op: Op, accept: Callable[[Instruction], bool] = lambda one: True) -> int:
    """Return the first instruction of a rank that does `op` and that `accept` takes."""
    return next(index for index, one in enumerate(program.ranks[rank]) if one.op is op and accept(one))
