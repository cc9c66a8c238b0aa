"""Generates the numba kernels of a program as readable Python.

A pass works on blocks of about a thousand elements that stay in the first-level cache. In each block it does one simple
thing at a time, each a loop that LLVM turns into vector instructions: unpack, draw random numbers, compute everything
element-wise and reduce it in one loop, pack what leaves it. So a gradient is read from memory once a pass.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.compll.backends.numba_expr import Body, Names, bare, constructor
from penstock.compll.functions import Function
from penstock.compll.fuse import (
    INPUTS,
    TOTAL,
    Emit,
    Keep,
    Pack,
    Pass,
    Scatter,
    Schedule,
    schedule_decode,
    schedule_encode,
)
from penstock.compll.ir import (
    GRADIENT,
    RESIDUAL,
    Apply,
    Expr,
    Filter,
    GroupReduce,
    Length,
    Let,
    Map,
    Program,
    Read,
    Reduce,
    Statement,
    element_of,
    expressions,
    walk,
)
from penstock.compll.operators import Operator
from penstock.compll.types import FLOAT, Scalar, Vector

BLOCK = 1024


@dataclass(slots=True)
class KernelWriter:
    """Writes one kernel."""

    program: Program
    schedule: Schedule
    names: Names
    operators: Mapping[str, Operator]
    adds: bool = False  # decode: add to the output instead of writing it
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    fields: dict[int, str] = field(default_factory=dict)  # decode's scalar fields
    sizes: dict[str, str] = field(default_factory=dict)  # of counted vectors

    def line(self, text: str = "") -> None:
        """Write one line at the present depth."""
        self.lines.append("    " * self.depth + text if text else "")

    def block(self, head: str, body: list[str]) -> None:
        """Write a compound statement."""
        self.line(head)
        self.depth += 1
        for text in body:
            self.line(text)
        self.depth -= 1

    # Sizes

    def size(self, vector: str) -> str:
        """Return text for the size of a vector (the gradient's is `numel`)."""
        if vector in INPUTS or vector == TOTAL:
            return "numel"
        return self.sizes.get(vector) or self.length(self.schedule.vectors[vector].length)

    def length(self, length: Length) -> str:
        """Return text for a length."""
        whole = "numel" if length.of == GRADIENT else self.size(length.of)
        return whole if length.group == 1 else f"({whole} + {length.group - 1}) // {length.group}"

    # Steps

    def steps(self) -> None:
        """Write the schedule."""
        scalars = self.scalar_body()
        number = 0
        for step in self.schedule.steps:
            match step:
                case Let():
                    text = scalars.value(step.expr)
                    self.flush(scalars)
                    self.line(f"{self.names.of(step.name)} = {bare(text)}")
                case Pass():
                    number += 1
                    self.line(f"# pass {number} over {step.length}")
                    PassWriter(self, step).write()
                case Apply():
                    self.apply(step, scalars)

    def scalar_body(self) -> Body:
        """Return a body for scalars between passes."""
        return Body(self.names, lambda name: None, {}, self.fields, self.size, index="int32(0)", in_loop=False)

    def flush(self, body: Body) -> None:
        """Write what a body has collected."""
        for text in body.lines:
            self.line(text)
        body.lines.clear()

    def apply(self, step: Apply, scalars: Body) -> None:
        """Write a whole-vector operator."""
        arguments = [self.names.of(name) for name in step.vectors]
        arguments += [scalars.value(scalar) for scalar in step.scalars]
        self.flush(scalars)
        if self.operators[step.operator].draws:
            arguments += ["seed_low", "seed_high", str(step.stream)]
        name = self.names.of(step.name)
        self.line(f"{name} = {step.operator}({', '.join(arguments)})")
        if step.length.of == step.name:
            self.sizes[step.name] = f"{name}.size"

    # The payload

    def offset(self, number: int) -> str:
        """Return text for the first byte of a field."""
        fixed, moving = 0, []
        for before in self.program.layout.fields[:number]:
            if isinstance(before.type, Scalar):
                fixed += before.type.nbytes
            else:
                assert before.length is not None
                moving.append(nbytes(before.type.element, self.length(before.length)))
        return " + ".join([str(fixed), *moving])

    def encode(self) -> None:
        """Write the body of encode."""
        self.line("numel = gradient.size")
        self.steps()
        body = self.scalar_body()
        for number, source in enumerate(self.program.encode.fields):
            if isinstance(source, Expr):
                kind = self.program.layout.fields[number].type
                assert isinstance(kind, Scalar)
                text = body.value(source)
                self.flush(body)
                if kind.is_float and source.op != "param":
                    self.block(f"if not is_finite({text}):", ["return NONFINITE"])
                self.line(f"store_{kind.storage}(out, {self.offset(number)}, {text})")
        self.line(f"return {self.offset(len(self.program.layout.fields))}")

    def decode(self) -> None:
        """Write the body of decode: find and check the fields, then run the passes."""
        self.line("numel = out.size")
        checks = dict(self.program.decode.checks)
        counted = {field.counts: number for number, field in enumerate(self.program.layout.fields) if field.counts}
        vectors = {item.field: item.name for item in self.program.decode.statements if isinstance(item, Read)}
        for number, item in enumerate(self.program.layout.fields):
            offset = self.offset(number)
            if isinstance(item.type, Vector):
                assert item.length is not None
                width = nbytes(item.type.element, self.length(item.length))
                if number in vectors:
                    self.line(f"{self.names.of_bytes(vectors[number])} = payload[{offset} : {offset} + {width}]")
                continue
            self.block(f"if payload.size < {offset} + {item.type.nbytes}:", ["return DAMAGED"])
            name = self.fields[number] = self.names.unique(item.name.replace(".", "_"))
            self.line(f"{name} = load_{item.type.storage}(payload, {offset})")
            self._refuse(number, item.type, name, checks)
            if item.counts in counted:
                self.sizes[item.counts] = f"int64({name})"
        self.block(f"if payload.size != {self.offset(len(self.program.layout.fields))}:", ["return DAMAGED"])
        if any(node.op == "random" for item in self.program.decode.statements for node in nodes(item)):
            self.line("seed_low = seed_high = uint32(0)")  # decode draws from the stream of seed 0
        self.steps()
        self.line("return 0")

    def _refuse(self, number: int, kind: Scalar, name: str, checks: Mapping[int, Expr]) -> None:
        """Write the tests a scalar field must pass."""
        if self.program.layout.fields[number].counts:
            self.block(f"if {name} < 0 or {name} > numel:", ["return DAMAGED"])
        elif number in checks:
            body = self.scalar_body()
            text = body.value(checks[number])
            self.flush(body)
            self.block(f"if {name} != {text}:", ["return DAMAGED"])
        elif kind.is_float:
            self.block(f"if not is_finite({name}):", ["return DAMAGED"])
        elif kind.bits < 8:
            self.block(f"if {name} > {kind.high}:", ["return DAMAGED"])


def nodes(statement: Statement) -> list[Expr]:
    """Return every expression in a statement."""
    return [node for expr in expressions(statement) for node in walk(expr)]


def nbytes(element: Scalar, size: str) -> str:
    """Return text for the bytes of a packed vector."""
    if element.bits < 8:
        return f"({size} + {element.per_byte - 1}) // {element.per_byte}"
    return f"({size})" if element.bits == 8 else f"{element.nbytes} * ({size})"


@dataclass(slots=True)
class PassWriter:
    """Writes one pass of a kernel."""

    kernel: KernelWriter
    step: Pass
    stored: dict[str, str] = field(default_factory=dict)  # vector computed by the first loop -> array it is left in
    loaded: dict[str, str] = field(default_factory=dict)  # vector in memory -> array of this block
    group: int = 0  # n of the reads below
    per_group: dict[int, str] = field(default_factory=dict)  # id of `v[i / n]` -> the vector v, spread over the block

    @property
    def names(self) -> Names:
        """Identifiers of the kernel."""
        return self.kernel.names

    def write(self) -> None:
        """Write the loop over blocks."""
        self._place()
        self._declare()
        total = self.kernel.length(self.step.length)
        groups = [output.group for output in self.step.outputs if isinstance(output, GroupReduce)]
        self._find_per_group()
        unit = math.lcm(8, *groups, *([self.group] if self.group else []))
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

    # What is where

    def _place(self) -> None:
        """Decide which vectors the first loop stores, and where."""
        for output in self.step.outputs:
            match output:
                case Keep():
                    self.stored[output.vector] = (
                        f"{self.names.of(output.to) if output.to not in INPUTS else output.to}_b"
                    )
                case Emit() if not self.kernel.adds:
                    self.stored.setdefault(output.vector, "out_b")
        for output in self.step.outputs:
            if isinstance(output, Pack) and self._needs_copy(output):
                self.stored.setdefault(output.vector, f"{self.names.of(output.vector)}_b")
        replaced = any(isinstance(output, Keep) and output.to == RESIDUAL for output in self.step.outputs)
        later = any(isinstance(output, Filter) for output in self.step.outputs)
        if replaced and later and any(item.name == TOTAL for item in self.step.maps):
            self.stored.setdefault(TOTAL, "total_b")  # filters come after the residual is overwritten

    def _needs_copy(self, output: Pack) -> bool:
        """Whether a vector is not already in memory as it is to be sent."""
        computed = any(item.name == output.vector for item in self.step.maps)
        return computed or output.element.bits < 8

    def _declare(self) -> None:
        """Write accumulators and the memory of vectors that outlive the pass."""
        line = self.kernel.line
        if self._checked():
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
        for name, array in self.stored.items():
            if not self._in_memory(array):
                line(f"{array} = np.empty({block}, np.{self._element(name).storage})")
        for name in self.step.inputs:
            vector = self.kernel.schedule.vectors.get(name)
            if isinstance(vector, Read) and self._unpacks(name):
                line(f"{self.names.of(name)}_r = np.empty({block}, np.{vector.element.storage})")
        for output in self.step.outputs:
            if isinstance(output, Filter):
                line(f"{self.names.of(output.name)}_keep = np.zeros({block}, np.uint8)")
            elif isinstance(output, GroupReduce):
                line(f"{self.names.of(output.name)}_v = np.empty({block}, np.{output.expr.type.storage})")
        for name in dict.fromkeys(self.per_group.values()):
            line(f"{self.names.of(name)}_x = np.empty({block}, np.{self._element(name).storage})")
        for stream, kind in self._streams():
            name, dtype = ("uniform", "float32") if kind.is_float else ("words", "uint32")
            line(f"{name}_{stream} = np.empty({block}, np.{dtype})")

    def _in_memory(self, array: str) -> bool:
        kept = [output.to for output in self.step.outputs if isinstance(output, Keep)]
        return array in ("out_b", f"{RESIDUAL}_b") or array in {f"{self.names.of(name)}_b" for name in kept}

    def _element(self, name: str) -> Scalar:
        vector = self.kernel.schedule.vectors.get(name)
        return FLOAT if vector is None else element_of(vector)

    def _unpacks(self, name: str) -> bool:
        """Whether a field of the payload needs unpacking; bytes are read where they are."""
        vector = self.kernel.schedule.vectors[name]
        return isinstance(vector, Read) and vector.element.bits != 8 and not self._is_kept(name)

    def _is_kept(self, name: str) -> bool:
        """Whether an earlier pass left a vector in memory."""
        return name in self.kernel.schedule.kept() and name not in self.stored

    def _streams(self) -> list[tuple[int, Scalar]]:
        """Return the random streams this pass draws from."""
        found = {node.value: node.type for expr in self._exprs() for node in walk(expr) if node.op == "random"}
        return sorted(found.items())

    def _checked(self) -> list[str]:
        """Return the vectors whose elements must be finite: the gradient, and floats that are sent or received."""
        found = [self.step.check] if self.step.check else []
        found += [output.vector for output in self.step.outputs if isinstance(output, Pack) and output.element == FLOAT]
        for name in self.step.inputs:
            vector = self.kernel.schedule.vectors.get(name)
            if isinstance(vector, Read) and vector.element == FLOAT and not self._is_kept(name):
                found.append(name)
        return list(dict.fromkeys(found))

    def _exprs(self) -> list[Expr]:
        """Return every expression the pass evaluates."""
        exprs = [item.expr for item in self.step.maps]
        for output in self.step.outputs:
            if isinstance(output, Reduce | GroupReduce | Filter):
                exprs += expressions(output)
        return exprs

    def _find_per_group(self) -> None:
        """Find reads of `v[i / n]` where v has one element for each n: it is spread over the block first."""
        indices = {item.name for item in self.step.maps if item.expr.op == "index"}
        for expr in self._exprs():
            for node in walk(expr):
                group = self._group_of(node, indices)
                if group and self.group in (0, group):
                    self.group = group
                    self.per_group[id(node)] = node.value

    def _group_of(self, node: Expr, indices: set[str]) -> int:
        if node.op != "at" or node.args[0].op != "div" or node.args[0].args[1].op != "const":
            return 0
        index, divisor = node.args[0].args
        is_index = index.op == "index" or (index.op == "element" and index.value in indices)
        length = self.step.length
        wanted = Length(length.of, length.group * divisor.value)
        return divisor.value if is_index and self.kernel.schedule.length(node.value) == wanted else 0

    # One block

    def _load(self) -> None:
        line, names = self.kernel.line, self.names
        for name in self.step.inputs:
            array = name if name in INPUTS else names.of(name)
            vector = self.kernel.schedule.vectors.get(name)
            if name == TOTAL:
                array = RESIDUAL  # an earlier pass left it there
            if isinstance(vector, Read) and self._unpacks(name):
                self._unpack(vector, names.of_bytes(name), f"{array}_r")
                self.loaded[name] = f"{array}_r"
            else:
                array = names.of_bytes(name) if isinstance(vector, Read) and not self._is_kept(name) else array
                block = f"{array}_b" if name not in self.stored else f"{array}_m"
                line(f"{block} = {array}[start : start + size]")
                self.loaded[name] = block
        for array in dict.fromkeys(self.stored.values()):
            if self._in_memory(array) and array not in self.loaded.values():
                line(f"{array} = {array.removesuffix('_b')}[start : start + size]")
        if self.kernel.adds and any(isinstance(output, Emit) for output in self.step.outputs):
            line("out_b = out[start : start + size]")
        for name in dict.fromkeys(self.per_group.values()):
            line(f"spread({names.of(name)}, {self.group}, start, size, {names.of(name)}_x)")
        for stream, kind in self._streams():
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
            if name in self.stored and not first:
                return f"{self.stored[name]}[i]"
            return f"{self.loaded[name]}[i]" if name in self.loaded else None

        kernel = self.kernel
        constant = {node: f"{self.names.of(name)}_x[i]" for node, name in self.per_group.items()} if first else {}
        return Body(self.names, element, maps, kernel.fields, kernel.size, constant=constant)

    def _compute(self) -> None:
        """Write the loop that does everything at once: vectors that leave it, reductions, the finite test."""
        body, after = self._body(first=True), []
        for name, array in self.stored.items():
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
        if self._checked():
            self.kernel.line("worst_b = int32(0)")
            after.append("worst = worst_b if worst_b > worst else worst")
        for name in self._checked():
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
            array = self.stored.get(output.vector) or self.loaded[output.vector]
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
        """Write the gathering of kept elements; eight at a time are passed over where none is kept."""
        line, name = self.kernel.line, self.names.of(output.name)
        line(f"{name}_keep[size:] = 0")
        line(f"words = {name}_keep.view(np.uint64)")
        line("for j in range((size + 7) // 8):")
        self.kernel.depth += 1
        line("if words[j] == 0:")
        line("    continue")
        body = self._body(first=False)
        text = body.value(output.value)
        body.lines += [f"{name}[{name}_count] = {text}", f"{name}_count += 1"]
        line("for i in range(8 * j, 8 * j + 8):")
        self.kernel.depth += 1
        self.kernel.block(f"if {name}_keep[i]:", body.lines)
        self.kernel.depth -= 2

    def _scatter(self, output: Scatter) -> None:
        body = self._body(first=False)
        index, value = body.vector(output.indices), body.vector(output.values)
        body.lines += [f"index = {index}", "if index < 0 or index >= numel:", "    return DAMAGED"]
        add = f"out[index] + factor * {value}"
        body.lines.append(f"out[index] = {add if self.kernel.adds else value}")
        self.kernel.block("for i in range(size):", body.lines)

    def _finish(self) -> None:
        line = self.kernel.line
        if self._checked():
            self.kernel.block("if worst >= INFINITY_BITS:", ["return NONFINITE"])
        for output in self.step.outputs:
            if isinstance(output, Reduce):
                for text in final_lines(output, self.names.of(output.name), self.kernel.length(self.step.length)):
                    line(text)
            elif isinstance(output, Filter):
                name = self.names.of(output.name)
                line(f"{name} = {name}[:{name}_count]")
                self.kernel.sizes[output.name] = f"{name}.size"


# Reductions: floats are compared as integers that sort alike, and summed in single precision within a block


def start_value(output: Reduce) -> str:
    """Return where a reduction over all blocks starts."""
    if output.reducer == "sum":
        return "0.0" if output.expr.type.is_float else "int32(0)"
    if output.reducer == "fold":
        return f"{constructor(output.expr.type)}(0)"
    return "int32(2147483647)" if output.reducer == "smaller" else "int32(-2147483648)"


def block_start(output: Reduce) -> str:
    """Return where a reduction over one block starts."""
    return "float32(0)" if output.reducer == "sum" and output.expr.type.is_float else start_value(output)


def step_lines(output: Reduce, name: str, text: str) -> list[str]:
    """Return what takes in one element."""
    if output.reducer == "sum":
        return [f"{name} = add({name}, {text})" if output.expr.type.is_float else f"{name} = int32({name} + {text})"]
    sign = "<" if output.reducer == "smaller" else ">"
    key = f"order_key({text})" if output.expr.type.is_float else text
    return [f"{name}_k = {key}", f"{name} = {name}_k if {name}_k {sign} {name} else {name}"]


def join_lines(output: Reduce, name: str) -> list[str]:
    """Return what takes in one block."""
    if output.reducer == "sum":
        return [f"{name} += float64({name}_b)" if output.expr.type.is_float else f"{name} = int32({name} + {name}_b)"]
    sign = "<" if output.reducer == "smaller" else ">"
    return [f"{name} = {name}_b if {name}_b {sign} {name} else {name}"]


def final_lines(output: Reduce, name: str, size: str) -> list[str]:
    """Return what turns the accumulator into the value."""
    if output.reducer == "fold":
        return []
    if output.reducer == "sum":
        return [f"{name} = float32({name})"] if output.expr.type.is_float else []
    if output.expr.type.is_float:
        return [f"{name} = key_value({name}, {size})"]
    return [f"{name} = {name} if {size} > 0 else int32(0)"]


def group_start(output: GroupReduce) -> str:
    """Return where the reduction of one group starts."""
    if output.reducer == "sum":
        return "0.0" if output.expr.type.is_float else "int32(0)"
    return "int32(2147483647)" if output.reducer == "smaller" else "int32(-2147483648)"


def group_lines(output: GroupReduce, name: str, text: str) -> list[str]:
    """Return what takes one element into a group."""
    if output.reducer == "sum" and output.expr.type.is_float:
        return [f"{name} = add({name}, float64({text}))"]
    return step_lines(Reduce(output.name, output.reducer, output.over, output.expr), name, text)


def group_value(output: GroupReduce, name: str) -> str:
    """Return a group's value."""
    if not output.expr.type.is_float:
        return name
    return f"float32({name})" if output.reducer == "sum" else f"key_value({name}, 1)"


# Whole modules

HEAD = '''"""{title}

Generated from {name}.cll by penstock's numba back end; change the algorithm, not this file.
"""

import numpy as np
from numba import float32, float64, int32, int64, njit, uint8, uint16, uint32, uint64

from penstock.compll.backends.numba_support import *

'''
KINDS = ("encode", "encode_feedback", "decode", "decode_add")


def generate(
    program: Program,
    functions: Mapping[str, Function],
    operators: Mapping[str, Operator],
    kinds: tuple[str, ...] = KINDS,
) -> str:
    """Return the source of a module with the kernels of a program."""
    constants = [f"{item.name} = {item.value}" for item in program.parameters if item.is_constant]
    title = f"{program.name}" + (f" with {', '.join(constants)}" if constants else "") + "."
    text = HEAD.format(title=title, name=program.name)
    schedules = {kind: _schedule(program, kind) for kind in kinds}
    text += _lowerings(program, schedules, functions, operators)
    reserved = frozenset(functions) | frozenset(operators) | _support_names()
    for kind in kinds:
        text += f"\n{_kernel(program, kind, schedules[kind], reserved, operators)}"
    return text


def _schedule(program: Program, kind: str) -> Schedule:
    if kind.startswith("encode"):
        return schedule_encode(program, feedback=kind == "encode_feedback")
    return schedule_decode(program)


def _lowerings(
    program: Program,
    schedules: Mapping[str, Schedule],
    functions: Mapping[str, Function],
    operators: Mapping[str, Operator],
) -> str:
    """Return the functions and operators that the kernels call."""
    called: dict[str, str] = {}
    for schedule in schedules.values():
        for step in schedule.steps:
            if isinstance(step, Apply):
                called[step.operator] = operators[step.operator].numba
    for name in _calls(program):
        called[name] = functions[name].numba
    return "".join(f"\n@helper\n{source}\n" for _, source in sorted(called.items()))


def _calls(program: Program) -> set[str]:
    roots = [expr for item in (*program.encode.statements, *program.decode.statements) for expr in expressions(item)]
    roots += [item for item in program.encode.fields if isinstance(item, Expr)]
    return {node.value for root in roots for node in walk(root) if node.op == "call"}


def _support_names() -> frozenset[str]:
    from penstock.compll.backends import numba_support

    return frozenset(name for name in vars(numba_support) if not name.startswith("_"))


def kernel_arguments(program: Program, kind: str) -> list[str]:
    """Return the arguments of a kernel, the program's own last."""
    heads = {
        "encode": ["gradient", "out", "seed_low", "seed_high"],
        "encode_feedback": ["gradient", "residual", "out", "seed_low", "seed_high"],
        "decode": ["payload", "out"],
        "decode_add": ["payload", "out", "factor"],
    }
    return heads[kind]


def _kernel(
    program: Program, kind: str, schedule: Schedule, reserved: frozenset[str], operators: Mapping[str, Operator]
) -> str:
    names = Names(reserved, {GRADIENT: GRADIENT, RESIDUAL: RESIDUAL, TOTAL: RESIDUAL})  # where the total is kept
    writer = KernelWriter(program, schedule, names, operators, adds=kind == "decode_add")
    own = [writer.names.of(parameter.name) for parameter in program.arguments]
    arguments = ", ".join([*kernel_arguments(program, kind), *own])
    if kind.startswith("encode"):
        writer.encode()
    else:
        writer.decode()
    return f"\ndef {kind}({arguments}):\n" + "\n".join(writer.lines) + "\n"
