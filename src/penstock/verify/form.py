"""The first stage of a proof: each instruction by itself makes sense.

The third stage is here too: no rank touches the same elements twice at once. Sends and receives go on while later
instructions are issued. Two of them that overlap in memory, one writing, must be ordered by `after`, directly or
through others; the list order alone is not enough.
"""

from collections.abc import Iterable, Iterator

from penstock.program import DATA, Buffer, Instruction, Op, Program, Slice
from penstock.program.accesses import Accesses
from penstock.verify.findings import Finding, Kind, blame, quote

_OPERANDS = {  # op: (writes, reads, has a peer)
    Op.SEND: (False, True, True),
    Op.RECV: (True, False, True),
    Op.MERGE: (True, True, False),
    Op.COPY: (True, True, False),
    Op.ENCODE: (True, True, False),
    Op.DECODE: (True, True, False),
    Op.NATIVE: (True, False, False),
}
_ENCODED = {  # op: which (write, read) may be encoded
    Op.MERGE: {(False, False), (False, True), (True, True)},
    Op.COPY: {(False, False), (True, True)},
    Op.ENCODE: {(True, False)},
    Op.DECODE: {(False, True)},
}


def check_form(program: Program) -> list[Finding]:
    """Check operands, bounds, peers, dependencies and encodings of every instruction."""
    buffers = {DATA: program.buffer(DATA)} | {buffer.name: buffer for buffer in program.buffers}
    findings = []
    for rank, instructions in enumerate(program.ranks):
        for index, instruction in enumerate(instructions):
            problem = next(_problems(instruction, rank, index, program.world_size, buffers), None)
            if problem is not None:
                findings.append(blame(program, problem[0], rank, index, problem[1]))
    return findings


def _problems(
    instruction: Instruction, rank: int, index: int, world_size: int, buffers: dict[str, Buffer]
) -> Iterator[tuple[Kind, str]]:
    yield from _operand_problems(instruction)
    for touched in (instruction.write, instruction.read):
        if touched is not None:
            yield from _slice_problems(touched, buffers)
    yield from _peer_problems(instruction.peer, rank, world_size)
    for earlier in instruction.after:
        if not 0 <= earlier < index:
            yield Kind.LATER_DEPENDENCY, f"waits for instruction {earlier}; wanted one before {index}"
    yield from _pair_problems(instruction, buffers)


def _operand_problems(instruction: Instruction) -> Iterator[tuple[Kind, str]]:
    found = (instruction.write is not None, instruction.read is not None, instruction.peer is not None)
    for name, has, wants in zip(("write", "read", "peer"), found, _OPERANDS[instruction.op], strict=True):
        if has is not wants:
            yield Kind.MALFORMED, f"{'lacks' if wants else 'has'} a {name}"


def _slice_problems(touched: Slice, buffers: dict[str, Buffer]) -> Iterator[tuple[Kind, str]]:
    if touched.buffer not in buffers:
        yield Kind.UNKNOWN_BUFFER, f"names {touched.buffer!r}; known: {', '.join(buffers)}"
    elif not 0 <= touched.start < touched.stop <= buffers[touched.buffer].numel:
        yield Kind.OUT_OF_BOUNDS, f"touches {touched}; the buffer has {buffers[touched.buffer].numel} elements"


def _peer_problems(peer: int | None, rank: int, world_size: int) -> Iterator[tuple[Kind, str]]:
    if peer == rank:
        yield Kind.SELF_MESSAGE, "has its own rank as peer"
    if peer is not None and not 0 <= peer < world_size:
        yield Kind.UNKNOWN_RANK, f"names rank {peer}; wanted 0..{world_size - 1}"


def _pair_problems(instruction: Instruction, buffers: dict[str, Buffer]) -> Iterator[tuple[Kind, str]]:
    write, read = instruction.write, instruction.read
    if instruction.op is Op.NATIVE and write is not None and write.buffer in buffers and buffers[write.buffer].encoded:
        yield Kind.ENCODING, "calls the engine's collective on an encoded buffer"
    if write is None or read is None:
        return
    if write.numel != read.numel:
        yield Kind.UNEVEN_OPERANDS, f"writes {write.numel} elements from {read.numel}"
    coded = (buffers[write.buffer].encoded, buffers[read.buffer].encoded)
    if coded not in _ENCODED[instruction.op]:
        names = ["encoded" if one else "dense" for one in coded]
        yield Kind.ENCODING, f"writes {names[0]} elements from {names[1]} ones"


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
