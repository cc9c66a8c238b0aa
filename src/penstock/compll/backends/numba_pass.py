"""One pass of a generated kernel: a loop over blocks that stay in the first-level cache.

In each block it does one simple thing at a time, each a loop that LLVM turns into vector instructions: unpack, draw
random numbers, compute everything element-wise and reduce it in one loop, pack what leaves it.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.compll.backends.numba_expr import Body, Names, bare
from penstock.compll.backends.numba_places import Places, find_places
from penstock.compll.backends.numba_reduce import (
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
from penstock.compll.schedule import INPUTS, TOTAL, Emit, Keep, Pack, Pass, Scatter

if TYPE_CHECKING:
    from penstock.compll.backends.numba_kernel import KernelWriter

BLOCK = 1024  # elements worked on at a time: their temporaries stay in the first-level cache


@dataclass(slots=True)
class PassWriter:
    """Writes one pass of a kernel."""

    kernel: "KernelWriter"
    step: Pass
    places: Places = field(init=False)
    loaded: dict[str, str] = field(default_factory=dict)  # vector in memory -> array of this block

    def __post_init__(self) -> None:
        self.places = find_places(self.step, self.kernel.schedule, self.names, self.kernel.adds)

    @property
    def names(self) -> Names:
        """Identifiers of the kernel."""
        return self.kernel.names

    def write(self) -> None:
        """Write the loop over blocks."""
        self._declare()
        total = self.kernel.length(self.step.length)
        groups = [output.group for output in self.step.outputs if isinstance(output, GroupReduce)]
        unit = math.lcm(8, *groups, *([self.places.group] if self.places.group else []))
        block = unit * max(1, BLOCK // unit)
        self._temporaries(block)
        self.kernel.line(f"for start in range(0, {total}, {block}):")
        self.kernel.depth += 1
        self.kernel.line(f"size = block_size(start, {total}, {block})")
        self._load()
        self._compute()
        self._pack()
        for output in self.step.outputs:
            match output:
                case Reduce() if output.reducer == "fold":
                    self._fold(output)
                case GroupReduce():
                    self._group(output)
                case Filter():
                    self._filter(output)
                case Scatter():
                    self._scatter(output)
        self.kernel.depth -= 1
        self._finish()

    def _declare(self) -> None:
        """Write accumulators and the memory of vectors that outlive the pass."""
        line = self.kernel.line
        if self.places.checked():
            line("worst = int32(0)")
        for output in self.step.outputs:
            match output:
                case Reduce():
                    line(f"{self.names.of(output.name)} = {start_value(output)}")
                case GroupReduce() | Filter():
                    size = self.kernel.length(output.length if isinstance(output, GroupReduce) else output.over)
                    line(f"{self.names.of(output.name)} = np.empty({size}, np.{element_of(output).storage})")
                case Keep() if output.to not in INPUTS:
                    size = self.kernel.length(self.step.length)
                    line(f"{self.names.of(output.to)} = np.empty({size}, np.{output.element.storage})")
                case Scatter() if not self.kernel.adds:
                    line("out[:] = float32(0)")
            if isinstance(output, Filter):
                line(f"{self.names.of(output.name)}_count = 0")

    def _temporaries(self, block: int) -> None:
        """Write the arrays of one block."""
        line = self.kernel.line
        for name, array in self.places.stored.items():
            if not self.places.in_memory(array):
                line(f"{array} = np.empty({block}, np.{self.places.element(name).storage})")
        for name in self.step.inputs:
            vector = self.kernel.schedule.vectors.get(name)
            if isinstance(vector, Read) and self.places.unpacks(name):
                line(f"{self.names.of(name)}_r = np.empty({block}, np.{vector.element.storage})")
        for output in self.step.outputs:
            if isinstance(output, Filter):
                line(f"{self.names.of(output.name)}_keep = np.zeros({block}, np.uint8)")
            elif isinstance(output, GroupReduce):
                line(f"{self.names.of(output.name)}_v = np.empty({block}, np.{output.expr.type.storage})")
        for name in self.places.spread():
            line(f"{self.names.of(name)}_x = np.empty({block}, np.{self.places.element(name).storage})")
        for stream, kind in self.places.streams():
            name, dtype = ("uniform", "float32") if kind.is_float else ("words", "uint32")
            line(f"{name}_{stream} = np.empty({block}, np.{dtype})")

    # One block

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
                line(f"{block} = {array}[start : start + size]")
                self.loaded[name] = block
        for array in dict.fromkeys(self.places.stored.values()):
            if self.places.in_memory(array) and array not in self.loaded.values():
                line(f"{array} = {array.removesuffix('_b')}[start : start + size]")
        if self.kernel.adds and any(isinstance(output, Emit) for output in self.step.outputs):
            line("out_b = out[start : start + size]")
        for name in self.places.spread():
            line(f"spread({names.of(name)}, {self.places.group}, start, size, {names.of(name)}_x)")
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
        constant = (
            {node: f"{self.names.of(name)}_x[i]" for node, name in self.places.per_group.items()} if first else {}
        )
        return Body(self.names, element, maps, kernel.fields, kernel.size, constant=constant)

    def _compute(self) -> None:
        """Write the loop that does everything at once: vectors that leave it, reductions, the finite test."""
        body, after = self._body(first=True), []
        for name, array in self.places.stored.items():
            body.lines.append(f"{array}[i] = {bare(body.vector(name))}")
        for output in self.step.outputs:
            match output:
                case Emit() if self.kernel.adds:
                    body.lines.append(f"out_b[i] = out_b[i] + factor * {body.vector(output.vector)}")
                case GroupReduce():
                    body.lines.append(f"{self.names.of(output.name)}_v[i] = {bare(body.value(output.expr))}")
                case Filter():
                    body.lines.append(f"{self.names.of(output.name)}_keep[i] = uint8({bare(body.value(output.keep))})")
                case Reduce() if output.reducer != "fold":
                    name = self.names.of(output.name)
                    self.kernel.line(f"{name}_b = {block_start(output)}")
                    body.lines += step_lines(output, f"{name}_b", bare(body.value(output.expr)))
                    after += join_lines(output, name)
        if self.places.checked():
            self.kernel.line("worst_b = int32(0)")
            after.append("worst = worst_b if worst_b > worst else worst")
        for name in self.places.checked():
            body.lines.append(f"magnitude = int32(float_bits({body.vector(name)}) & MAGNITUDE)")
            body.lines.append("worst_b = magnitude if magnitude > worst_b else worst_b")
        if body.lines:
            self.kernel.block("for i in range(size):", body.lines)
        for text in after:
            self.kernel.line(text)

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
        line(f"for j in range(size // {group}):")
        self.kernel.depth += 1
        line(f"{name}_g = {group_start(output)}")
        self.kernel.block(f"for i in range({group}):", group_lines(output, f"{name}_g", f"{name}_v[{group} * j + i]"))
        line(f"{name}[start // {group} + j] = {result}")
        self.kernel.depth -= 1
        line(f"if size % {group}:")
        self.kernel.depth += 1
        line(f"{name}_g = {group_start(output)}")
        element = f"{name}_v[size // {group} * {group} + i]"
        self.kernel.block(f"for i in range(size % {group}):", group_lines(output, f"{name}_g", element))
        line(f"{name}[(start + size) // {group}] = {result}")
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
        body.lines += [f"index = {index}", "if index < 0 or index >= numel:", "    return DAMAGED"]
        add = f"out[index] + factor * {value}"
        body.lines.append(f"out[index] = {add if self.kernel.adds else value}")
        self.kernel.block("for i in range(size):", body.lines)

    def _finish(self) -> None:
        line = self.kernel.line
        if self.places.checked():
            self.kernel.block("if worst >= INFINITY_BITS:", ["return NONFINITE"])
        for output in self.step.outputs:
            if isinstance(output, Reduce):
                for text in final_lines(output, self.names.of(output.name), self.kernel.length(self.step.length)):
                    line(text)
            elif isinstance(output, Filter):
                name = self.names.of(output.name)
                line(f"{name} = {name}[:{name}_count]")
                self.kernel.sizes[output.name] = f"{name}.size"
