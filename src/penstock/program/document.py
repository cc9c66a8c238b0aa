"""Programs as JSON: `penstock-program/1`, for looking at and for programs made elsewhere.

Slices are written as they print, `data[0:4]`. Reading checks the form only; `verify` says whether the program is right.
"""

import os
import re
from typing import Any

from penstock.fields import Fields, read_json, write_json
from penstock.program import Buffer, Collective, Instruction, Op, Program, Slice

FORMAT = "penstock-program/1"
_FIELDS = ("format", "strategy", "collective", "world_size", "numel", "root", "servers", "buffers", "ranks")
_SLICE = re.compile(r"([^\[\]]+)\[([0-9]{1,18}):([0-9]{1,18})\]")


def load_program(path: str | os.PathLike[str]) -> Program:
    """Read the program in the JSON file at `path`."""
    return read_json(path, FORMAT, program_from_fields)


def save_program(program: Program, path: str | os.PathLike[str]) -> None:
    """Write `program` to the JSON file at `path`."""
    write_json(path, program_document(program))


def program_document(program: Program) -> dict[str, Any]:
    """Return the program as a `penstock-program/1` document."""
    return {
        "format": FORMAT,
        "strategy": program.strategy,
        "collective": program.collective.value,
        "world_size": program.world_size,
        "numel": program.numel,
        "root": program.root,
        "servers": program.servers,
        "buffers": [{"name": b.name, "numel": b.numel, "encoded": b.encoded} for b in program.buffers],
        "ranks": [{"instructions": [_instruction_document(i) for i in rank]} for rank in program.ranks],
    }


def program_from_fields(fields: Fields) -> Program:
    """Build a program from the fields of a `penstock-program/1` document."""
    fields.reject_unknown(_FIELDS)
    world_size = fields.integer("world_size", 1)
    ranks = tuple(_instructions(rank) for rank in fields.objects("ranks"))
    if len(ranks) != world_size:
        raise fields.error("ranks", f"{world_size} lists of instructions, one per rank")
    return Program(
        strategy=fields.text("strategy"),
        collective=Collective(fields.choice("collective", tuple(one.value for one in Collective))),
        world_size=world_size,
        numel=fields.integer("numel", 0),
        ranks=ranks,
        buffers=tuple(_buffer(one) for one in fields.objects("buffers", [])),
        root=fields.integer("root", 0, 0),
        servers=fields.integer("servers", 0, 0),
    )


def _instruction_document(instruction: Instruction) -> dict[str, Any]:
    slices = {"write": instruction.write, "read": instruction.read}
    document: dict[str, Any] = {"op": instruction.op.value}
    document |= {key: str(touched) for key, touched in slices.items() if touched is not None}
    if instruction.peer is not None:
        document["peer"] = instruction.peer
    document |= {"after": list(instruction.after)} if instruction.after else {}
    return document if instruction.keeps else {**document, "keeps": False}


def _instructions(rank: Fields) -> tuple[Instruction, ...]:
    rank.reject_unknown(("instructions",))
    return tuple(_instruction(one) for one in rank.objects("instructions"))


def _instruction(fields: Fields) -> Instruction:
    fields.reject_unknown(("op", "write", "read", "peer", "after", "keeps"))
    return Instruction(
        Op(fields.choice("op", tuple(one.value for one in Op))),
        _slice(fields, "write"),
        _slice(fields, "read"),
        fields.integer("peer", 0, None),
        fields.integer_list("after", 0, []),
        fields.flag("keeps", True),
    )


def _slice(fields: Fields, name: str) -> Slice | None:
    text = fields.optional_text(name)
    if text is None:
        return None
    match = _SLICE.fullmatch(text)
    if match is None:
        raise fields.error(name, "a slice such as data[0:4]")
    return Slice(match[1], int(match[2]), int(match[3]))


def _buffer(fields: Fields) -> Buffer:
    fields.reject_unknown(("name", "numel", "encoded"))
    return Buffer(fields.text("name"), fields.integer("numel", 0), fields.flag("encoded", False))
