"""Triton source of a compressor: one kernel for each pass, written to be read.

Text only, so that it can be shown and tested without Triton; `triton.py` runs it. A kernel has a head (scalars every
program needs), a loop over its tiles, and, where it reduces, an end that the last program to finish runs alone: it adds
up what the others left, and writes the scalar fields of the payload. So an encode is as many launches as it has passes.
"""

import keyword
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.compll.backends.stages import Pass, Stages
from penstock.compll.functions import Function
from penstock.compll.ir import (
    GRADIENT,
    LATEST,
    NUMEL,
    Apply,
    Expr,
    Field,
    Filter,
    GroupReduce,
    Length,
    Let,
    Map,
    Program,
    Read,
    Reduce,
    show,
    walk,
)
from penstock.compll.types import BOOL, FLOAT, Kind, Scalar, Vector

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "mod": "%", "shl": "<<", "shr": ">>", "and": "&", "or": "|", "xor": "^",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "land": "&", "lor": "|",
}  # fmt: skip
RESERVED = {
    *keyword.kwlist, "min", "max", "sum", "abs", "range", "float", "int", "load", "store", "words", "uniform", "below",
    "partial", "block", "size", "full", "i", "tl", "triton", "numel", "seed", "factor", "positions", "inside", "worst",
    "latest", "kept", "valid", "start", "word", "on",
}  # fmt: skip
KINDS = {"numel": "i32", "seed": "u64", "factor": "fp32", "units": "i32", "nbytes": "i64"}  # besides pointers


@dataclass(slots=True)
class Procedure:
    """Encode or decode as the kernels see it: where values are found."""

    program: Program
    stages: Stages
    payload: str  # pointer to the body that fields are in
    slots: Mapping[str, int]  # scalars that passes leave for one another: reductions, and sizes of counted vectors
    reads: Mapping[str, Read]
    is_encode: bool
    prefix: str = ""  # of local names, where two procedures meet in one kernel

    def field_offset(self, kernel: "Kernel", number: int) -> str:
        """Return where a field starts in the body, as text."""
        fixed, moving = 0, []
        for item in self.program.layout.fields[:number]:
            if isinstance(item.type, Scalar):
                fixed += item.type.nbytes
                continue
            assert item.length is not None
            size, bits = kernel.size(self, item.length), item.type.element.bits
            moving.append(f"tl.cdiv({size}, {8 // bits})" if bits < 8 else f"tl.cast({size}, tl.int64) * {bits // 8}")
        return " + ".join([*moving, str(fixed)]) if moving else str(fixed)


@dataclass(slots=True)
class Kernel:
    """One kernel while it is written."""

    name: str
    summary: str
    functions: Mapping[str, Function]
    arguments: dict[str, None] = field(default_factory=dict)  # in order of first use
    constants: dict[str, None] = field(default_factory=dict)
    head: list[str] = field(default_factory=list)
    loop: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    finals: dict[str, str] = field(default_factory=dict)  # scalars known at the end only
    calls: dict[str, None] = field(default_factory=dict)  # functions of the program's table it calls
    feedback: Procedure | None = None  # the decode whose payload is taken off the residual
    offers_feedback: bool = False
    over: Length | None = None  # what the loop goes over
    tile: str = ""  # source of the function that handles one tile
    _known: dict[tuple[str, object], str] = field(default_factory=dict)
    _used: set[str] = field(default_factory=lambda: set(RESERVED))
    _uses: Counter[int] = field(default_factory=Counter)

    # Names

    def use(self, argument: str) -> str:
        """Return an argument of the kernel, declared."""
        self.arguments[argument] = None
        return argument

    def fresh(self, hint: str) -> str:
        """Return a local name like `hint` that is still free."""
        hint = hint if hint.isidentifier() else "value"
        name, number = (f"{hint}_" if hint in RESERVED else hint), 2
        while name in self._used:
            name, number = f"{hint}_{number}", number + 1
        self._used.add(name)
        return name

    def knows(self, where: str, vector: str) -> bool:
        """Say whether an element of a vector is at hand."""
        return (where, vector) in self._known

    def lines(self, where: str) -> list[str]:
        """Return the part of the kernel that an expression of that kind is written to."""
        return {"scalar": self.head, "end": self.end}.get(where, self.loop)

    def count_uses(self, roots: Iterable[Expr]) -> None:
        """Note which expressions are used more than once, so that they get a name."""
        for root in roots:
            for node in walk(root):
                self._uses.update(id(argument) for argument in node.args)

    # Expressions: `where` is "tile" (in the loop), "gather" (in the loop, at any index), "scalar" (head) or "end"

    def text(self, p: Procedure, expr: Expr, where: str) -> str:
        """Return an expression as source, its parts written to lines before where that helps reading."""
        key = (where + p.prefix, id(expr))
        if key not in self._known:
            text = self._text(p, expr, where)
            if not text.isidentifier() and expr.args and (self._uses[id(expr)] > 1 or expr.name or len(text) > 60):
                text = self.let(where, p.prefix + (expr.name or "value"), text)
            self._known[key] = text
        return self._known[key]

    def _named(self, p: Procedure, expr: Expr, where: str, name: str) -> str:
        """Return an expression that the program gives a name."""
        key = (where + p.prefix, id(expr))
        if key not in self._known and expr.args:
            self._known[key] = self.let(where, p.prefix + name, self._text(p, expr, where))
        return self.text(p, expr, where)

    def let(self, where: str, hint: str, text: str) -> str:
        """Write `hint = text` and return the name."""
        name = self.fresh(hint)
        self.lines(where).append(f"{name} = {text}")
        return name

    def _text(self, p: Procedure, expr: Expr, where: str) -> str:
        match expr.op:
            case "const":
                return literal(expr)
            case "param":
                return self.use(f"float_{expr.value}" if expr.type.is_float else f"int_{expr.value}")
            case "name":
                return self.scalar(p, expr.value, "end" if where == "end" else "scalar")
            case "field":
                return self.field(p, expr.value)
            case "size":
                return self.size(p, Length(expr.value))
            case "index":
                return "0" if where in ("scalar", "end") else "i"
            case "element":
                return self.element(p, expr.value, where)
            case "at" if _is_index(p, expr.args[0]) and where != "scalar" and _length(p, expr.value) == self.over:
                return self.element(p, expr.value, where)  # its own place: no need to look it up
        arguments = [self.text(p, argument, where) for argument in expr.args]
        return self._operation(p, expr, arguments, where)

    def _operation(self, p: Procedure, expr: Expr, arguments: list[str], where: str) -> str:
        match expr.op:
            case "at":
                return self.gather(p, expr.value, arguments[0])
            case "random":
                return self.random(expr, arguments, where)
            case "cast":
                return cast(arguments[0], expr)
            case "neg":
                return f"(-{arguments[0]})"
            case "not":
                return f"({arguments[0]} == 0)"
            case "select":
                return f"tl.where({', '.join(arguments)})"
            case "call":
                return self.call(expr, arguments)
            case "div" if expr.type.is_float:
                first, second = (_tensor(a, t) for a, t in zip(expr.args, arguments, strict=True))
                return f"tl.div_rn({first}, {second})"
            case "div":
                return f"({arguments[0]} // {arguments[1]})"
        return f"({arguments[0]} {INFIX[expr.op]} {arguments[1]})"

    def call(self, expr: Expr, arguments: list[str]) -> str:
        """Return a call of a function of the table; narrow integers are brought to their type and back."""
        function = self.functions[expr.value]
        self.calls[function.name] = None
        brought = [_tensor(a, t) for a, t in zip(expr.args, arguments, strict=True)]
        if function.argument is not None and function.argument.kind is Kind.UINT:
            brought = [f"{text}.to(tl.{function.argument.storage})" for text in brought]
        text = f"fn_{function.name}({', '.join(brought)})"
        return f"{text}.to(tl.int32)" if function.result and function.result.kind is Kind.UINT else text

    def random(self, expr: Expr, bounds: list[str], where: str) -> str:
        """Return the random number of each element."""
        self.use("seed")
        stream = expr.value
        if where == "tile":
            word = f"words(seed, {stream}, block, BLOCK)"
        else:
            index = "i" if where == "gather" else "tl.full([], 0, tl.int32)"
            word = f"words_at(seed, {stream}, {index})"
        if not expr.type.is_float:
            low, high = (_tensor(a, t) for a, t in zip(expr.args, bounds, strict=True))
            return f"below({word}, {low}, {high})"
        unit = bounds == ["0.0", "1.0"]
        return f"uniform({word})" if unit else f"({bounds[0]} + uniform({word}) * ({bounds[1]} - {bounds[0]}))"

    # Leaves

    def scalar(self, p: Procedure, name: str, where: str) -> str:
        """Return a scalar by name: computed again from what earlier passes left."""
        if where == "end" and name in self.finals:
            return self.finals[name]
        key = (where + p.prefix, name)
        if key not in self._known:
            if name in p.stages.lets:
                text = self._named(p, p.stages.lets[name].expr, where, name)
                named = text if text.isidentifier() else self.let(where, p.prefix + name, text)
            else:
                named = self.let(where, p.prefix + name, self._slot(p, name))
            self._known[key] = named
        return self._known[key]

    def _slot(self, p: Procedure, name: str) -> str:
        loaded = f"tl.load({self.use('scalars_ptr')} + {p.slots[name]})"
        return f"as_float({loaded})" if _scalar_type(p, name).is_float else loaded

    def size(self, p: Procedure, length: Length) -> str:
        """Return the number of elements of a length."""
        if length.of == GRADIENT or length.of == LATEST:
            whole = self.use("numel")
        else:
            key = ("size", length.of)
            if key not in self._known:
                loaded = f"tl.load({self.use('scalars_ptr')} + {p.slots[f'{length.of}.size']})"
                self._known[key] = self.let("scalar", f"{length.of}_size", loaded)
            whole = self._known[key]
        return whole if length.group == 1 else f"tl.cdiv({whole}, {length.group})"

    def field(self, p: Procedure, number: int) -> str:
        """Return a scalar field of the payload that is decoded."""
        key = ("field" + p.prefix, number)
        if key not in self._known:
            item = p.program.layout.fields[number]
            assert isinstance(item.type, Scalar)
            text = f"load_scalar({self.use(p.payload)} + {p.field_offset(self, number)}, {item.type.nbytes})"
            text = f"as_float({text})" if item.type.is_float else text
            self._known[key] = self.let("scalar", p.prefix + item.name, text)
        return self._known[key]

    def element(self, p: Procedure, vector: str, where: str) -> str:
        """Return element i of a vector."""
        key = (where + p.prefix, vector)
        if key not in self._known:
            if vector in p.stages.maps:
                text = self._named(p, p.stages.maps[vector].expr, where, vector)
                self._known[key] = text if text.isidentifier() else self.let(where, p.prefix + vector, text)
            elif vector == GRADIENT and where == "tile" and self.offers_feedback:
                self._known[key] = self._gradient_with_feedback()
            else:
                self._known[key] = self.let(where, p.prefix + vector, self._loaded(p, vector, where))
        return self._known[key]

    def _loaded(self, p: Procedure, vector: str, where: str) -> str:
        if vector in p.reads:
            return self._read(p, p.reads[vector], "i", "full" if where == "tile" else "")
        pointer, scalar = self.pointer(p, vector)
        size = self.size(p, _length(p, vector))
        if where == "tile":
            return f"load({pointer}, i, {size}, full).to({register(scalar)})"
        return f"tl.load({pointer} + i, mask=on, other=0).to({register(scalar)})"

    def pointer(self, p: Procedure, vector: str) -> tuple[str, Scalar]:
        """Return the pointer to a vector in memory, and its element type."""
        if vector in (GRADIENT, LATEST):
            return self.use(f"{vector}_ptr"), FLOAT
        return self.use(f"{vector}_ptr"), _element(p, vector)

    def _gradient_with_feedback(self) -> str:
        """Write the load of the gradient with last step's error added, where the caller keeps one."""
        latest, kept = "latest", "kept"
        pointers = [self.use("gradient_ptr"), self.use("residual_ptr")]
        self.constants["FEEDBACK"] = None
        self.loop.append(f"{latest} = load({pointers[0]}, i, numel, full).to(tl.float32)")
        self.loop += ["gradient = latest", "if FEEDBACK:"]
        self.loop.append(f"    {kept} = load({pointers[1]}, i, numel, full)")
        if self.feedback is not None:
            self._take_off_last(self.feedback)
        self.loop += ["    gradient = latest + kept", f"    store({pointers[1]}, i, gradient, numel, full)"]
        self._used |= {"gradient", "latest", "kept"}
        return "gradient"

    def _take_off_last(self, decode: Procedure) -> None:
        """Write what the last payload carried off the residual, inside `if FEEDBACK: if LAST:`."""
        self.constants["LAST"] = None
        outer_head, outer_loop = self.head, self.loop
        self.head, self.loop = [], []
        sent = self.element(decode, decode.program.decode.result, "tile")
        head, loop = self.head, self.loop
        self.head, self.loop = outer_head, outer_loop
        # Scalars of the last payload exist where there is one; elsewhere nothing reads them.
        if head:
            names = [line.partition(" = ")[0] for line in head]
            self.head += ["if LAST:", *(f"    {line}" for line in head)]
            self.head += ["else:", *(f"    {name} = 0" for name in names)]
        self.loop += ["    if LAST:", *(f"        {line}" for line in loop), f"        kept = kept - {sent}"]

    def _read(self, p: Procedure, read: Read, index: str, full: str) -> str:
        """Return elements of a vector that is packed in the payload: a tile where `full` says so, else at any index."""
        size, offset = self.size(p, read.length), p.field_offset(self, read.field)
        pointer, bits = f"{self.use(p.payload)} + {offset}", read.element.bits
        if bits < 8 and full:
            return f"load_packed({pointer}, block, {size}, full, {bits}, BLOCK)"
        if bits < 8:
            return f"load_packed_at({pointer}, {index}, {size}, {bits})"
        full = full or "False"
        if bits == 8:
            return f"load({pointer}, {index}, {size}, {full}).to(tl.int32)"
        text = f"load_words({pointer}, {index}, {size}, {full}, {bits // 8}, {self._aligned(offset, bits)})"
        return f"as_float({text})" if read.element.is_float else text

    def _aligned(self, offset: str, bits: int) -> str:
        """Return whether a field may be accessed whole: its offset allows it and the caller says the body starts so."""
        *moving, fixed = offset.split(" + ")
        steps = [int(term.rpartition(" * ")[2]) if " * " in term else 1 for term in moving]
        if any(step % (bits // 8) for step in [int(fixed), *steps]):
            return "False"
        self.constants["ALIGNED"] = None
        return "ALIGNED"

    def gather(self, p: Procedure, vector: str, index: str) -> str:
        """Return elements of a vector at any index, held inside; 0 from an empty one."""
        size = self.size(p, _length(p, vector))
        held = f"tl.minimum(tl.maximum({index}, 0), {size} - 1)"
        if vector in p.reads:
            return self._read(p, p.reads[vector], held, "")
        pointer, scalar = self.pointer(p, vector)
        return f"tl.load({pointer} + {held}, mask={held} >= 0, other=0).to({register(scalar)})"

    # Source

    def signature(self) -> str:
        """Return the lines that begin the kernel; sizes and parameters keep one type, so that none compiles it anew."""
        arguments = [f'{name}: "{_kind(name)}"' if _kind(name) else name for name in self.arguments]
        arguments += [f"{name}: tl.constexpr" for name in self.constants]
        return "\n".join(_wrapped(self.name, arguments))

    def source(self) -> str:
        """Return the kernel as text."""
        plain = [name for name in self.arguments if not name.endswith("_ptr")]
        quoted = ", ".join(f'"{name}"' for name in plain)
        decorator = f"@triton.jit(do_not_specialize=[{quoted}])" if plain else "@triton.jit"
        lines = [f'"""{self.summary}"""', *self.head, *self.loop, *self.end]
        kernel = "\n".join([decorator, self.signature(), *(f"    {line}" for line in lines)]) + "\n"
        return f"{self.tile}\n\n{kernel}" if self.tile else kernel

    def loop_over(self, size: str, carried: Sequence[str], summary: str) -> None:
        """Make the loop's lines a function of one tile, and call it for all of them.

        Tiles that lie wholly inside come first, without masks; the last one, where it does not, is handled by itself.
        `carried` are the names that go from tile to tile.
        """
        call = self._make_tile(carried, summary)
        self.loop = [
            f"whole = {size} // BLOCK",
            "for block in tl.range(tl.program_id(0), whole, tl.num_programs(0), num_stages=STAGES):",
            *call("block", True),
            f"if (whole * BLOCK < {size}) & (tl.program_id(0) == whole % tl.num_programs(0)):",
            *call("whole", False),
        ]

    def loop_over_units(self, size: str, carried: Sequence[str], summary: str) -> None:
        """The same for a program that handles `units` neighbouring stretches of UNIT elements, empty ones included."""
        call = self._make_tile(carried, summary)
        self.head += ["first = tl.program_id(0) * units * (UNIT // BLOCK)", "last = first + units * (UNIT // BLOCK)"]
        self.loop = [
            f"if last * BLOCK <= {size}:",
            "    for block in tl.range(first, last, num_stages=STAGES):",
            *(f"    {line}" for line in call("block", True)),
            "else:",
            "    for block in tl.range(first, last):",
            *(f"    {line}" for line in call("block", False)),
        ]

    def _make_tile(self, carried: Sequence[str], summary: str) -> Callable[[str, bool], list[str]]:
        """Write the function of one tile; return what writes a call of it."""
        used = set(re.findall(r"\w+", "\n".join(self.loop)))
        local = [name for line in self.head for name in re.findall(r"^\s*(\w+) = ", line)]
        passed = [name for name in dict.fromkeys([*self.arguments, *local]) if name in used and name not in carried]
        self.constants |= dict.fromkeys(("BLOCK", "STAGES"))
        fixed = [name for name in self.constants if name in used | {"BLOCK"} - {"STAGES"}]
        declared = ["block", *passed, *carried, "full: tl.constexpr", *(f"{name}: tl.constexpr" for name in fixed)]
        result = [f"return {', '.join(carried)}"] if carried else []
        lines = [f'"""{summary}"""', "i = positions(block, BLOCK)", *self.loop, *result]
        body = [f"    {line}" for line in lines]
        self.tile = "\n".join(["@triton.jit", *_wrapped(f"{self.name}_tile", declared), *body]) + "\n"
        into = f"{', '.join(carried)} = " if carried else ""

        def call(block: str, full: bool) -> list[str]:
            given = textwrap.wrap(", ".join([block, *passed, *carried, str(full), *fixed]), 105)
            return [f"    {into}{self.name}_tile(", *(f"        {line}" for line in given), "    )"]

        return call


def _wrapped(name: str, arguments: Sequence[str]) -> list[str]:
    """Return the lines of a function's head."""
    text = ", ".join(argument.replace(": ", ":_") for argument in arguments)  # a line ends between arguments
    lines = [line.replace(":_", ": ") for line in textwrap.wrap(text, 110, break_long_words=False)]
    return [f"def {name}(", *(f"    {line}" for line in lines), "):"]


def _kind(argument: str) -> str:
    """Return the type an argument is declared to have; pointers have none."""
    if argument.endswith("_ptr"):
        return ""
    return KINDS.get(argument) or ("fp32" if argument.startswith("float_") else "i32")


def literal(expr: Expr) -> str:
    """Return a constant as source; floats are exact in single precision."""
    if not expr.type.is_float:
        return str(int(expr.value))
    text = repr(float(expr.value))
    return f'float("{text}")' if text in ("inf", "-inf", "nan") else text


def register(scalar: Scalar) -> str:
    """Return the type of a scalar in registers."""
    return "tl.float32" if scalar.is_float else "tl.int32"


def _tensor(expr: Expr, text: str) -> str:
    return f"tl.full([], {text}, {register(expr.type)})" if expr.op == "const" else text


def cast(text: str, expr: Expr) -> str:
    """Return a conversion; integers of every width share int32, so most are nothing."""
    source, target = expr.args[0].type, expr.type
    if target.is_float:
        return f"{_tensor(expr.args[0], text)}.to(tl.float32)"
    if source.is_float:
        return f"to_uint({text}, {target.high})" if target.kind is Kind.UINT else f"to_int({text})"
    if source is BOOL:
        return f"{text}.to(tl.int32)"
    inner = expr.args[0]
    return text if target.low <= inner.low and inner.high <= target.high else f"({text} & {target.high})"


def _is_index(p: Procedure, expr: Expr) -> bool:
    """Say whether an expression is the element's own index, as in `map(range(v.size), f)`."""
    if expr.op == "element" and expr.value in p.stages.maps:
        return _is_index(p, p.stages.maps[expr.value].expr)
    return expr.op == "index"


def _statement(p: Procedure, name: str) -> object:
    statements = p.program.encode.statements if p.is_encode else p.program.decode.statements
    return next(statement for statement in statements if statement.name == name)


def _scalar_type(p: Procedure, name: str) -> Scalar:
    statement = _statement(p, name)
    assert isinstance(statement, Reduce | Let)
    return statement.expr.type


def _element(p: Procedure, vector: str) -> Scalar:
    statement = _statement(p, vector)
    match statement:
        case Apply() | Read():
            return statement.element
        case Filter():
            return statement.value.type
        case Map() | GroupReduce():
            return statement.expr.type
    raise AssertionError(vector)


def _length(p: Procedure, vector: str) -> Length:
    if vector in (GRADIENT, LATEST):
        return NUMEL
    statement = _statement(p, vector)
    assert isinstance(statement, Apply | Read | Filter | Map | GroupReduce)
    return statement.length


def field_store(kernel: Kernel, p: Procedure, number: int, value: str) -> list[str]:
    """Return the lines that write element i of a vector field."""
    item: Field = p.program.layout.fields[number]
    assert isinstance(item.type, Vector)
    assert item.length is not None
    element, size, offset = item.type.element, kernel.size(p, item.length), p.field_offset(kernel, number)
    pointer = f"{kernel.use(p.payload)} + {offset}"
    if element.bits < 8:
        return [f"store_packed({pointer}, {value}, block, {size}, full, {element.bits}, BLOCK)"]
    if element.bits == 8:
        return [f"store({pointer}, i, {value}, {size}, full)"]
    bits = f"as_bits({value})" if element.is_float else value
    aligned = kernel._aligned(offset, element.bits)
    return [f"store_words({pointer}, i, {bits}, {size}, full, {element.bits // 8}, {aligned})"]


def describe(step: Pass, names: Sequence[str]) -> str:
    """Return a sentence on what a pass does."""
    parts = [f"{item.name} = {item.reducer} of {show(item.expr)}" for item in step.reduces]
    parts += [f"{item.name} kept" for item in step.keeps] + [f"field {name}" for name in names]
    return "; ".join(parts)[:90]
