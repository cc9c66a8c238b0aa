"""The passes of a generated kernel: loops over stretches that stay in the first-level cache.

In each stretch a pass does one simple thing at a time, each a loop that LLVM turns into vector instructions: unpack,
draw random numbers, compute everything element-wise and reduce it in one loop, pack what leaves it. Where it reduces or
reads by block, that loop is one over the blocks of the stretch, with one of known length inside. Passes that are
done together (`Tiled`) go over the same stretch one after another.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.compll.backends.numba.numba_expr import (
    Body,
    Names,
    bare,
    block_start,
    final_lines,
    group_lines,
    group_start,
    group_value,
    join_lines,
    start_value,
    step_lines,
)
from penstock.compll.ir import GRADIENT, RESIDUAL, Filter, GroupReduce, Map, Read, Reduce, element_of
from penstock.compll.lower.passes import INPUTS, TOTAL, Emit, Keep, Pack, Pass, Scatter, Schedule, block_read, nodes_of
from penstock.compll.types import FLOAT, Scalar

if TYPE_CHECKING:
    from penstock.compll.backends.numba.write_numba import KernelWriter


LOOP = 16  # elements that a loop of their own pays for


@dataclass(frozen=True, slots=True)
class Places:
    """Where the vectors of one pass are, what it draws and checks; decided before its loop is written."""

    step: Pass
    schedule: Schedule
    names: Names  # identifiers of the kernel
    stored: Mapping[str, str]  # vector computed by the first loop -> array it is left in
    block: int  # n, where the pass reduces by blocks of n or reads `v[i / n]`; else 0
    per_block: Mapping[int, str]  # id of `v[i / n]` -> the vector v
    local: frozenset[str]  # vectors of which only what belongs to this stretch is in memory

    def in_memory(self, array: str) -> bool:
        """Whether a stored vector's array is a part of one that outlives the pass."""
        kept = [output.to for output in self.step.outputs if isinstance(output, Keep)]
        return array in ("out_b", f"{RESIDUAL}_b") or array in {f"{self.names.of(name)}_b" for name in kept}

    def element(self, name: str) -> Scalar:
        """Return the type of a vector's elements."""
        vector = self.schedule.vectors.get(name)
        return FLOAT if vector is None else element_of(vector)

    def is_kept(self, name: str) -> bool:
        """Whether an earlier pass left a vector in memory."""
        return name in self.schedule.kept() and name not in self.stored

    def unpacks(self, name: str) -> bool:
        """Whether a vector is a field of the payload that needs unpacking; bytes are read where they are."""
        vector = self.schedule.vectors.get(name)
        return isinstance(vector, Read) and vector.element.bits != 8 and not self.is_kept(name)

    def window(self, name: str) -> str:
        """Return the part of a vector's array that belongs to this stretch, as the text of a slice."""
        return ":size" if name in self.local else "start : start + size"

    def of_block(self, name: str) -> str:
        """Return the place of block j of this stretch in the array of a vector with one element for each block."""
        return "j" if name in self.local else f"start // {self.block} + j"

    def blockwise(self) -> list[str]:
        """Return the vectors of which the pass reads one element for each block."""
        return list(dict.fromkeys(self.per_block.values()))

    def streams(self) -> list[tuple[int, Scalar]]:
        """Return the random streams this pass draws from."""
        found = {node.value: node.type for node in nodes_of(self.step) if node.op == "random"}
        return sorted(found.items())

    def checked(self) -> list[str]:
        """Return the vectors whose elements must be finite: the gradient, and floats that are sent or received."""
        found = [self.step.check] if self.step.check else []
        found += [output.vector for output in self.step.outputs if isinstance(output, Pack) and output.element == FLOAT]
        for name in self.step.inputs:
            vector = self.schedule.vectors.get(name)
            if isinstance(vector, Read) and vector.element == FLOAT and not self.is_kept(name):
                found.append(name)
        return list(dict.fromkeys(found))


def find_places(
    step: Pass, schedule: Schedule, names: Names, adds: bool, local: frozenset[str] = frozenset()
) -> Places:
    """Return where the vectors of a pass are; `adds` says that decode adds to the output instead of writing it."""
    stored = _stored(step, names, adds)
    block, per_block = _per_block(step, schedule)
    return Places(step, schedule, names, stored, block, per_block, local)


def _stored(step: Pass, names: Names, adds: bool) -> dict[str, str]:
    """Decide which vectors the first loop stores, and where."""
    stored: dict[str, str] = {}
    for output in step.outputs:
        match output:
            case Keep():
                stored[output.vector] = f"{names.of(output.to) if output.to not in INPUTS else output.to}_b"
            case Emit() if not adds:
                stored.setdefault(output.vector, "out_b")
    for output in step.outputs:
        if isinstance(output, Pack) and _needs_copy(step, output):
            stored.setdefault(output.vector, f"{names.of(output.vector)}_b")
    replaced = any(isinstance(output, Keep) and output.to == RESIDUAL for output in step.outputs)
    later = any(isinstance(output, Filter) for output in step.outputs)
    if replaced and later and any(item.name == TOTAL for item in step.maps):
        stored.setdefault(TOTAL, "total_b")  # filters come after the residual is overwritten
    return stored


def _needs_copy(step: Pass, output: Pack) -> bool:
    """Whether a vector is not already in memory as it is to be sent."""
    return output.element.bits < 8 or any(item.name == output.vector for item in step.maps)


def _per_block(step: Pass, schedule: Schedule) -> tuple[int, dict[int, str]]:
    """Find the size of the blocks that a pass reduces, or else reads by, and the reads of `v[i / n]` with that n.

    Few elements are no loop for vector instructions: they are reduced after the loop that computes them.
    """
    groups = [item.group for item in step.outputs if isinstance(item, GroupReduce) and item.group >= LOOP]
    reads = [(node, block_read(node, step, schedule)) for node in nodes_of(step)]
    chosen = next(iter([*groups, *(block for _, block in reads if block)]), 0)
    return chosen, {id(node): node.value for node, block in reads if block == chosen and chosen}


BLOCK = 1024  # elements worked on at a time: their temporaries stay in the first-level cache


def write_passes(kernel: "KernelWriter", passes: Sequence[Pass], local: frozenset[str] = frozenset()) -> None:
    """Write passes that are done together: one loop over stretches of the first pass's vectors, or the gradient's."""
    writers = [PassWriter(kernel, step, local) for step in passes]
    whole = min((step.length for step in passes), key=lambda length: length.group)
    unit = math.lcm(*(writer.unit() * (writer.step.length.group // whole.group) for writer in writers))
    stretch = unit * max(1, BLOCK // unit)
    sizes = [stretch * whole.group // step.length.group for step in passes]
    for line in dict.fromkeys(
        line for writer, size in zip(writers, sizes, strict=True) for line in writer.declare(size)
    ):
        kernel.line(line)
    kernel.line(f"for {'start' if len(passes) == 1 else 'first'} in range(0, {kernel.length(whole)}, {stretch}):")
    kernel.depth += 1
    for writer, size in zip(writers, sizes, strict=True):
        if len(passes) > 1:
            coarser = writer.step.length.group // whole.group
            kernel.line(f"start = first // {coarser}" if coarser > 1 else "start = first")
        kernel.line(f"size = block_size(start, {kernel.length(writer.step.length)}, {size})")
        writer.write()
    kernel.depth -= 1
    for line in dict.fromkeys(line for writer in writers for line in writer.finish()):
        kernel.line(line)


@dataclass(slots=True)
class PassWriter:
    """Writes one pass of a kernel."""

    kernel: "KernelWriter"
    step: Pass
    local: frozenset[str]
    places: Places = field(init=False)
    loaded: dict[str, str] = field(default_factory=dict)  # vector in memory -> array of this block

    def __post_init__(self) -> None:
        self.places = find_places(self.step, self.kernel.schedule, self.names, bool(self.kernel.source), self.local)

    @property
    def names(self) -> Names:
        """Identifiers of the kernel."""
        return self.kernel.names

    def unit(self) -> int:
        """Return how many elements must stay together: whole bytes, whole counters of random numbers, whole blocks."""
        groups = [output.group for output in self.step.outputs if isinstance(output, GroupReduce)]
        packs = [output.element.bits < 8 for output in self.step.outputs if isinstance(output, Pack)]
        reads = [self.places.unpacks(name) for name in self.step.inputs]
        is_free = self.step.length.group > 1 and not (any(packs) or any(reads) or self.places.streams())
        return math.lcm(1 if is_free else 8, *groups, *([self.places.block] if self.places.block else []))

    def write(self) -> None:
        """Write what the pass does to one stretch."""
        self._load()
        self._compute()
        self._pack()
        for output in self.step.outputs:
            match output:
                case Reduce() if output.reducer == "fold":
                    self._fold(output)
                case GroupReduce() if output.group != self.places.block:
                    self._group(output)
                case Filter():
                    self._filter(output)
                case Scatter():
                    self._scatter(output)

    def declare(self, stretch: int) -> list[str]:
        """Return lines with accumulators, the memory of vectors that outlive the pass, and that of one stretch."""
        lines: list[str] = ["worst = int32(0)"] if self.places.checked() else []
        for output in self.step.outputs:
            match output:
                case Reduce():
                    lines.append(f"{self.names.of(output.name)} = {start_value(output)}")
                case GroupReduce():
                    size = self._room(output.name, stretch // output.group)
                    lines.append(f"{self.names.of(output.name)} = np.empty({size}, np.{element_of(output).storage})")
                case Filter():
                    size = self.kernel.length(output.over)
                    lines.append(f"{self.names.of(output.name)} = np.empty({size}, np.{element_of(output).storage})")
                    lines.append(f"{self.names.of(output.name)}_count = 0")
                case Keep() if output.to not in INPUTS:
                    size = self._room(output.vector, stretch)
                    lines.append(f"{self.names.of(output.to)} = np.empty({size}, np.{output.element.storage})")
                case Scatter() if not self.kernel.source:
                    lines.append("out[:] = float32(0)")
        return lines + self._temporaries(stretch)

    def _room(self, name: str, stretch: int) -> str:
        """Return the size of a vector's array."""
        length = self.kernel.schedule.length(name)
        return str(stretch) if name in self.local else self.kernel.length(length)

    def _temporaries(self, stretch: int) -> list[str]:
        """Return lines with the arrays of one stretch."""
        lines: list[str] = []
        for name, array in self.places.stored.items():
            if not self.places.in_memory(array):
                lines.append(f"{array} = np.empty({stretch}, np.{self.places.element(name).storage})")
        for name in self.step.inputs:
            vector = self.kernel.schedule.vectors.get(name)
            if isinstance(vector, Read) and self.places.unpacks(name):
                lines.append(f"{self.names.of(name)}_r = np.empty({stretch}, np.{vector.element.storage})")
        for output in self.step.outputs:
            if isinstance(output, Filter):
                lines.append(f"{self.names.of(output.name)}_keep = np.zeros({stretch}, np.uint8)")
            elif isinstance(output, GroupReduce) and output.group != self.places.block:
                lines.append(f"{self.names.of(output.name)}_v = np.empty({stretch}, np.{output.expr.type.storage})")
        for stream, kind in self.places.streams():
            name, dtype = ("uniform", "float32") if kind.is_float else ("words", "uint32")
            lines.append(f"{name}_{stream} = np.empty({stretch}, np.{dtype})")
        return lines

    # One stretch

    def _load(self) -> None:
        line, names = self.kernel.line, self.names
        for name in self.step.inputs:
            array = name if name in INPUTS else names.of(name)
            vector = self.kernel.schedule.vectors.get(name)
            if name == TOTAL:
                array = RESIDUAL  # an earlier pass left it there
            if isinstance(vector, Read) and self.places.unpacks(name):
                self._unpack(vector, names.of_bytes(name), f"{array}_r")
                self.loaded[name] = f"{array}_r"
            else:
                array = names.of_bytes(name) if isinstance(vector, Read) and not self.places.is_kept(name) else array
                block = f"{array}_b" if name not in self.places.stored else f"{array}_m"
                line(f"{block} = {array}[{self.places.window(name)}]")
                self.loaded[name] = block
        for name, array in self.places.stored.items():
            if self.places.in_memory(array) and array not in self.loaded.values():
                line(f"{array} = {array.removesuffix('_b')}[{self.places.window(name)}]")
        if self.kernel.source and any(isinstance(output, Emit) for output in self.step.outputs):
            for array in dict.fromkeys(("out", self.kernel.source)):
                line(f"{array}_b = {array}[start : start + size]")
        for stream, kind in self.places.streams():
            name = "uniform" if kind.is_float else "words"
            line(f"fill_{name}({name}_{stream}, size, seed_low, seed_high, {stream}, start)")

    def _unpack(self, vector: Read, packed: str, array: str) -> None:
        element = vector.element
        if element.bits < 8:
            self.kernel.line(f"unpack{element.bits}({packed}[start // {element.per_byte} :], size, {array})")
        else:
            width = element.nbytes
            self.kernel.line(f"copy_bytes({packed}[{width} * start :], {width} * size, {array}.view(np.uint8))")

    def _body(self, first: bool) -> Body:
        """Return a loop body; after the first loop, what it stored is read back."""
        maps: dict[str, Map] = {item.name: item for item in self.step.maps}

        def element(name: str) -> str | None:
            if name in self.places.stored and not first:
                return f"{self.places.stored[name]}[i]"
            if name == GRADIENT and self.kernel.scales and name in self.loaded:
                return f"(factor * {self.loaded[name]}[i])"
            return f"{self.loaded[name]}[i]" if name in self.loaded else None

        kernel = self.kernel
        constant = {node: f"{self.names.of(name)}_x" for node, name in self.places.per_block.items()} if first else {}
        return Body(self.names, element, maps, kernel.fields, kernel.size, constant=constant)

    def _compute(self) -> None:
        """Write the loop that does everything at once: vectors that leave it, reductions, the finite test."""
        body, after = self._body(first=True), []
        before, joins = self._per_block_lines()
        for name, array in self.places.stored.items():
            body.lines.append(f"{array}[i] = {bare(body.vector(name))}")
        for output in self.step.outputs:
            match output:
                case Emit() if self.kernel.source:
                    body.lines.append(f"out_b[i] = {self.kernel.source}_b[i] + factor * {body.vector(output.vector)}")
                case GroupReduce() if output.group == self.places.block:
                    text = bare(body.value(output.expr))
                    body.lines += group_lines(output, f"{self.names.of(output.name)}_g", text)
                case GroupReduce():
                    body.lines.append(f"{self.names.of(output.name)}_v[i] = {bare(body.value(output.expr))}")
                case Filter():
                    body.lines.append(f"{self.names.of(output.name)}_keep[i] = uint8({bare(body.value(output.keep))})")
                case Reduce() if output.reducer != "fold":
                    name = self.names.of(output.name)
                    self.kernel.line(f"{name}_b = {block_start(output)}")
                    body.lines += step_lines(output, f"{name}_b", bare(body.value(output.expr)))
                    after += join_lines(output, name)
        if self.places.checked() and not self.places.block:
            self.kernel.line("worst_b = int32(0)")
            after.append("worst = worst_b if worst_b > worst else worst")
        for name in self.places.checked():
            body.lines.append(f"magnitude = int32(float_bits({body.vector(name)}) & MAGNITUDE)")
            if self.places.block:  # of many short loops; a greatest value takes each a dozen instructions at its end
                body.lines.append("bad |= magnitude >= INFINITY_BITS")
            else:
                body.lines.append("worst_b = magnitude if magnitude > worst_b else worst_b")
        if body.lines:
            self._loop(body.lines, before, joins)
        for text in after:
            self.kernel.line(text)

    def _per_block_lines(self) -> tuple[list[str], list[str]]:
        """Return what is done before and after the elements of one block: values that are read, and reductions."""
        before = [
            f"{self.names.of(name)}_x = {self.names.of(name)}[{self.places.of_block(name)}]"
            for name in self.places.blockwise()
        ]
        after: list[str] = []
        if self.places.checked():
            before.append("bad = False")
            after.append("worst = INFINITY_BITS if bad else worst")
        for output in self.step.outputs:
            if isinstance(output, GroupReduce) and output.group == self.places.block:
                name = self.names.of(output.name)
                before.append(f"{name}_g = {group_start(output)}")
                after.append(f"{name}[{self.places.of_block(output.name)}] = {group_value(output, f'{name}_g')}")
        return before, after

    def _loop(self, body: list[str], before: list[str], after: list[str]) -> None:
        """Write the loop over the elements; with blocks, over whole ones with a loop of known length, then the rest."""
        block, line = self.places.block, self.kernel.line
        if not block:
            self.kernel.block("for i in range(size):", body)
            return
        for head, count in (
            (f"for j in range(size // {block}):", str(block)),
            (f"if size % {block}:", "size % {block}"),
        ):
            line(head)
            self.kernel.depth += 1
            if not head.startswith("for"):
                line(f"j = size // {block}")
            for text in before:
                line(text)
            self.kernel.block(f"for lane in range({count.format(block=block)}):", [f"i = {block} * j + lane", *body])
            for text in after:
                line(text)
            self.kernel.depth -= 1

    def _pack(self) -> None:
        for output in self.step.outputs:
            if not isinstance(output, Pack):
                continue
            array = self.places.stored.get(output.vector) or self.loaded[output.vector]
            offset, element = self.kernel.offset(output.field), output.element
            if element.bits < 8:
                place = f"{offset} + start // {element.per_byte}"
                self.kernel.line(f"pack{element.bits}({array}, size, out[{place} :])")
            elif element.bits == 8:
                self.kernel.line(f"copy_bytes({array}, size, out[{offset} + start :])")
            else:
                width = element.nbytes
                place = f"{offset} + {width} * start"
                self.kernel.line(f"copy_bytes({array}.view(np.uint8), {width} * size, out[{place} :])")

    def _fold(self, output: Reduce) -> None:
        body, name = self._body(first=False), self.names.of(output.name)
        assert output.combine is not None
        body.lines += [f"left = {name}", f"right = {body.value(output.expr)}"]
        text = body.value(output.combine)
        body.lines.append(f"{name} = {text} if start + i > 0 else right")
        self.kernel.block("for i in range(size):", body.lines)

    def _group(self, output: GroupReduce) -> None:
        """Write the reduction of groups: the whole ones in a loop of known length, then what is left."""
        line, name, group = self.kernel.line, self.names.of(output.name), output.group
        result = group_value(output, f"{name}_g")
        before = "" if output.name in self.local else f"start // {group} + "
        line(f"for j in range(size // {group}):")
        self.kernel.depth += 1
        line(f"{name}_g = {group_start(output)}")
        self.kernel.block(f"for i in range({group}):", group_lines(output, f"{name}_g", f"{name}_v[{group} * j + i]"))
        line(f"{name}[{before}j] = {result}")
        self.kernel.depth -= 1
        line(f"if size % {group}:")
        self.kernel.depth += 1
        line(f"{name}_g = {group_start(output)}")
        element = f"{name}_v[size // {group} * {group} + i]"
        self.kernel.block(f"for i in range(size % {group}):", group_lines(output, f"{name}_g", element))
        line(f"{name}[{before}size // {group}] = {result}")
        self.kernel.depth -= 1

    def _filter(self, output: Filter) -> None:
        """Write the gathering of kept elements: a byte of 1 for each, eight to a word, taken from the lowest bit up."""
        line, name = self.kernel.line, self.names.of(output.name)
        line(f"{name}_keep[size:] = 0")
        line(f"words = {name}_keep.view(np.uint64)")
        line("for j in range((size + 7) // 8):")
        self.kernel.depth += 1
        line("word = words[j]")
        body = self._body(first=False)
        body.lines.append("i = 8 * j + (lowest_bit(word) >> 3)")
        text = body.value(output.value)
        body.lines += [f"{name}[{name}_count] = {text}", f"{name}_count += 1", "word &= word - ONE"]
        self.kernel.block("while word != 0:", body.lines)
        self.kernel.depth -= 1

    def _scatter(self, output: Scatter) -> None:
        body = self._body(first=False)
        index, value = body.vector(output.indices), body.vector(output.values)
        body.lines += [f"index = {index}", "if index < 0 or index >= numel:", f"    {self.kernel.refuse('DAMAGED')}"]
        add = f"out[index] + factor * {value}"
        body.lines.append(f"out[index] = {add if self.kernel.source else value}")
        self.kernel.block("for i in range(size):", body.lines)

    def finish(self) -> list[str]:
        """Return lines that turn accumulators into values, and refuse what is not finite."""
        lines: list[str] = []
        if self.places.checked():
            lines += ["if worst >= INFINITY_BITS:", f"    {self.kernel.refuse('NONFINITE')}"]
        for output in self.step.outputs:
            if isinstance(output, Reduce):
                lines += final_lines(output, self.names.of(output.name), self.kernel.length(self.step.length))
            elif isinstance(output, Filter):
                name = self.names.of(output.name)
                lines.append(f"{name} = {name}[:{name}_count]")
                self.kernel.sizes[output.name] = f"{name}.size"
        return lines
