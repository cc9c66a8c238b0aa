"""Expressions of the IR as Triton source that gives the same bits as the reference.

`Procedure` is encode or decode with what is in memory and where; `Kernel` is one kernel while expressions are added.

`where` says which part of the kernel an expression is written for: "tile" (in the loop), "gather" (in the loop, at any
index), "block" (in the loop, once for each block of the tile), "scalar" (the head) or "end".
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.compll.backends.triton.kernel_text import INFIX, KernelText, cast, limit, literal, register, tensor
from penstock.compll.functions import FUNCTIONS, Function
from penstock.compll.ir import (
    GRADIENT,
    LATEST,
    NUMEL,
    Expr,
    GroupReduce,
    Length,
    Let,
    Map,
    Program,
    Read,
    Reduce,
    Statement,
    element_of,
    walk,
)
from penstock.compll.lower.passes import Schedule
from penstock.compll.types import FLOAT, Kind, Scalar


@dataclass(slots=True)
class Procedure:
    """One of a program's two procedures, and where its kernels find values."""

    program: Program
    schedule: Schedule
    payload: str  # pointer to the body that fields are in
    slots: Mapping[str, int]  # scalars that passes leave for one another: reductions, and sizes of counted vectors
    is_encode: bool
    prefix: str = ""  # of local names, where two procedures meet in one kernel
    statements: dict[str, Statement] = field(init=False)
    maps: dict[str, Map] = field(init=False)  # evaluated where they are used
    lets: dict[str, Let] = field(init=False)
    reads: dict[str, Read] = field(init=False)

    def __post_init__(self) -> None:
        self.statements, self.maps, self.lets, self.reads = {}, {}, {}, {}
        self.add(self.program.encode.statements if self.is_encode else self.program.decode.statements)

    def add(self, statements: Sequence[Statement]) -> None:
        """Let kernels see these statements too."""
        self.statements |= {item.name: item for item in statements}
        self.maps |= {item.name: item for item in statements if isinstance(item, Map)}
        self.lets |= {item.name: item for item in statements if isinstance(item, Let)}
        self.reads |= {item.name: item for item in statements if isinstance(item, Read)}

    def scalar_type(self, name: str) -> Scalar:
        """Return the type of a scalar."""
        statement = self.statements[name]
        assert isinstance(statement, Reduce | Let)
        return statement.expr.type

    def element(self, vector: str) -> Scalar:
        """Return the element type of a vector."""
        if vector in (GRADIENT, LATEST):
            return FLOAT
        statement = self.statements[vector]
        assert not isinstance(statement, Let | Reduce)
        return element_of(statement)

    def length(self, vector: str) -> Length:
        """Return the length of a vector."""
        if vector in (GRADIENT, LATEST):
            return NUMEL
        statement = self.statements[vector]
        assert not isinstance(statement, Let)
        return statement.length

    def is_index(self, expr: Expr) -> bool:
        """Say whether an expression is the element's own index, as in `map(range(v.size), f)`."""
        if expr.op == "element" and expr.value in self.maps:
            return self.is_index(self.maps[expr.value].expr)
        return expr.op == "index"

    def needs(self, expr: Expr) -> set[str]:
        """Return what earlier steps must have left for an expression: reductions, sizes, and vectors in memory."""
        found: set[str] = set()
        for node in walk(expr):
            if node.op == "name":
                let = self.lets.get(node.value)
                found |= self.needs(let.expr) if let else {node.value}
            elif node.op in ("size", "at") and node.value not in (GRADIENT, LATEST, *self.reads):
                found.add(node.value)
        return found


@dataclass(slots=True)
class Kernel(KernelText):
    """One kernel while it is written, with the values that it has computed already."""

    functions: Mapping[str, Function] = field(default_factory=lambda: FUNCTIONS)
    over: Length | None = None  # what the loop goes over
    local: frozenset[str] = frozenset()  # vectors with one element for each block, which nothing outside reads
    block: int = 0  # elements of a block, where values by block are computed here
    finals: dict[str, str] = field(default_factory=dict)  # scalars known at the end only
    calls: dict[str, None] = field(default_factory=dict)  # functions of the program's table it calls
    known: dict[tuple[str, object], str] = field(default_factory=dict)  # (where, what) -> its text
    _uses: Counter[int] = field(default_factory=Counter)

    def knows(self, where: str, vector: str) -> bool:
        """Say whether the kernel has loaded or computed a vector's elements already."""
        return (where, vector) in self.known

    def count_uses(self, roots: Iterable[Expr]) -> None:
        """Note which expressions are used more than once, so that they get a name."""
        for root in roots:
            for node in walk(root):
                self._uses.update(id(argument) for argument in node.args)

    def text(self, p: Procedure, expr: Expr, where: str) -> str:
        """Return an expression as source, its parts written to lines before where that helps reading."""
        key = (where + p.prefix, id(expr))
        if key not in self.known:
            text = self._text(p, expr, where)
            if not text.isidentifier() and expr.args and (self._uses[id(expr)] > 1 or expr.name or len(text) > 60):
                text = self.let(where, p.prefix + (expr.name or "value"), text)
            self.known[key] = text
        return self.known[key]

    def _named(self, p: Procedure, expr: Expr, where: str, name: str) -> str:
        """Return an expression that the program gives a name."""
        key = (where + p.prefix, id(expr))
        if key not in self.known and expr.args:
            self.known[key] = self.let(where, p.prefix + name, self._text(p, expr, where))
        text = self.text(p, expr, where)
        return text if text.isidentifier() else self.let(where, p.prefix + name, text)

    def _text(self, p: Procedure, expr: Expr, where: str) -> str:
        match expr.op:
            case "const":
                return literal(expr)
            case "param":
                return self.use(f"float_{expr.value}" if expr.type.is_float else f"int_{expr.value}")
            case "operand":
                return ("left", "right")[expr.value]
            case "name":
                return self.scalar(p, expr.value, "end" if where == "end" else "scalar")
            case "field":
                return self.field(p, expr.value)
            case "size":
                return self.size(p, Length(expr.value))
            case "index":
                return {"scalar": "0", "end": "0", "block": self.block_places()}.get(where, "i")
            case "element":
                return self.element(p, expr.value, where)
            case "at" if p.is_index(expr.args[0]) and where != "scalar" and p.length(expr.value) == self.over:
                return self.element(p, expr.value, where)  # its own place: no need to look it up
            case "at" if where == "tile" and self._reads_block(p, expr):
                return self._spread(p, expr.value)
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
                first, second = (tensor(a, t) for a, t in zip(expr.args, arguments, strict=True))
                return f"tl.div_rn({first}, {second})"
            case "div":
                return f"({arguments[0]} // {arguments[1]})"
        return f"({arguments[0]} {INFIX[expr.op]} {arguments[1]})"

    def call(self, expr: Expr, arguments: list[str]) -> str:
        """Return a call of a function of the table; narrow integers are brought to their type and back."""
        function = self.functions[expr.value]
        self.calls[function.name] = None
        brought = [tensor(a, t) for a, t in zip(expr.args, arguments, strict=True)]
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
            index = {"gather": "i", "block": self.block_places()}.get(where, "tl.full([], 0, tl.int32)")
            word = f"words_at(seed, {stream}, {index})"
        if not expr.type.is_float:
            low, high = (tensor(a, t) for a, t in zip(expr.args, bounds, strict=True))
            return f"below({word}, {low}, {high})"
        unit = bounds == ["0.0", "1.0"]
        return f"uniform({word})" if unit else f"({bounds[0]} + uniform({word}) * ({bounds[1]} - {bounds[0]}))"

    # Scalars

    def scalar(self, p: Procedure, name: str, where: str) -> str:
        """Return a scalar by name: computed again from what earlier passes left."""
        if where == "end" and name in self.finals:
            return self.finals[name]
        key = (where + p.prefix, name)
        if key not in self.known:
            if name in p.lets:
                self.known[key] = self._named(p, p.lets[name].expr, where, name)
            else:
                loaded = f"tl.load({self.use('scalars_ptr')} + {p.slots[name]})"
                text = f"as_float({loaded})" if p.scalar_type(name).is_float else loaded
                self.known[key] = self.let(where, p.prefix + name, text)
        return self.known[key]

    def size(self, p: Procedure, length: Length) -> str:
        """Return the number of elements of a length."""
        if length.of in (GRADIENT, LATEST):
            whole = self.use("numel")
        else:
            key = ("size", length.of)
            if key not in self.known:
                loaded = f"tl.load({self.use('scalars_ptr')} + {p.slots[f'{length.of}.size']})"
                self.known[key] = self.let("scalar", f"{length.of}_size", loaded)
            whole = self.known[key]
        return whole if length.group == 1 else f"tl.cdiv({whole}, {length.group})"

    def field(self, p: Procedure, number: int) -> str:
        """Return a scalar field of the payload that is decoded."""
        key = ("field" + p.prefix, number)
        if key not in self.known:
            item = p.program.layout.fields[number]
            assert isinstance(item.type, Scalar)
            text = f"load_scalar({self.use(p.payload)} + {self.offset(p, number)}, {item.type.nbytes})"
            text = f"as_float({text})" if item.type.is_float else text
            self.known[key] = self.let("scalar", p.prefix + item.name, text)
        return self.known[key]

    # Vectors

    def element(self, p: Procedure, vector: str, where: str) -> str:
        """Return element i of a vector: computed where it is a map, else loaded."""
        key = (where + p.prefix, vector)
        if key not in self.known:
            if vector in p.maps:
                self.known[key] = self._named(p, p.maps[vector].expr, where, vector)
            else:
                self.known[key] = self.let(where, p.prefix + vector, self._loaded(p, vector, where))
        return self.known[key]

    def _reads_block(self, p: Procedure, expr: Expr) -> bool:
        """Say whether `v[i / n]` is the same for all elements of blocks that tiles hold whole, and v is at hand."""
        index, vector = expr.args[0], expr.value
        if index.op != "div" or index.args[1].op != "const" or not p.is_index(index.args[0]) or self.over is None:
            return False
        block = int(index.args[1].value)
        if p.length(vector) != Length(self.over.of, self.over.group * block) or not fits_tiles(block):
            return False
        if not (vector in self.local or vector in p.reads or (self.local and vector in p.maps)):
            return False
        self.block = self.block or block
        return self.block == block

    def _spread(self, p: Procedure, vector: str) -> str:
        key = ("spread" + p.prefix, vector)
        if key not in self.known:
            text = f"spread({self.element(p, vector, 'block')}, {self.block}, BLOCK)"
            self.known[key] = self.let("tile", f"{p.prefix}{vector}_each", text)
        return self.known[key]

    def block_places(self) -> str:
        """Return the numbers of a tile's blocks."""
        return f"block_places(block, {self.block}, BLOCK)"

    def _reduced(self, p: Procedure, step: GroupReduce) -> str:
        """Return the reduction of each block of a tile."""
        is_float, size = step.expr.type.is_float, self.size(p, step.over)
        start = ("0.0" if is_float else "0") if step.reducer == "sum" else limit(step.reducer, is_float)
        value = f"held({self.text(p, step.expr, 'tile')}, i, {size}, full, {start})"
        rows = f"by_block({value}, {step.group}, BLOCK)"
        if step.reducer == "sum":
            wide = ".to(tl.float64)" if is_float else ""
            return f"tl.sum({rows}{wide}, axis=1).to({register(step.expr.type)})"
        function = "tl.min" if step.reducer == "smaller" else "tl.max"
        return f"{function}({rows}, axis=1)" + (" + 0.0" if is_float else "")

    def _loaded(self, p: Procedure, vector: str, where: str) -> str:
        if where == "block":
            return self._loaded_by_block(p, vector)
        if vector in p.reads:
            return self._read(p, p.reads[vector], "i", "full" if where == "tile" else "")
        pointer, kind = self.use(f"{vector}_ptr"), register(p.element(vector))
        if where == "tile":
            return f"load({pointer}, i, {self.size(p, p.length(vector))}, full).to({kind})"
        return f"tl.load({pointer} + i, mask=on, other=0).to({kind})"

    def _loaded_by_block(self, p: Procedure, vector: str) -> str:
        made = p.statements[vector]
        if isinstance(made, GroupReduce) and vector in self.local:
            return self._reduced(p, made)
        if vector in p.reads:
            return self._read(p, p.reads[vector], self.block_places(), "full")
        pointer, size = self.use(f"{vector}_ptr"), self.size(p, p.length(vector))
        return f"load({pointer}, {self.block_places()}, {size}, full).to({register(p.element(vector))})"

    def gather(self, p: Procedure, vector: str, index: str) -> str:
        """Return elements of a vector at any index, held inside; 0 from an empty one."""
        size = self.size(p, p.length(vector))
        held = f"tl.minimum(tl.maximum({index}, 0), {size} - 1)"
        if vector in p.reads:
            return self._read(p, p.reads[vector], held, "")
        pointer, kind = self.use(f"{vector}_ptr"), register(p.element(vector))
        return f"tl.load({pointer} + {held}, mask={held} >= 0, other=0).to({kind})"

    def _read(self, p: Procedure, read: Read, index: str, full: str) -> str:
        """Return elements of a vector that is packed in the payload: a tile where `full` says so, else at any index."""
        size, offset = self.size(p, read.length), self.offset(p, read.field)
        pointer, bits = f"{self.use(p.payload)} + {offset}", read.element.bits
        if bits < 8 and full and index == "i":
            return f"load_packed({pointer}, block, {size}, full, {bits}, BLOCK)"
        if bits < 8:
            return f"load_packed_at({pointer}, {index}, {size}, {bits})"
        full = full or "False"
        if bits == 8:
            return f"load({pointer}, {index}, {size}, {full}).to(tl.int32)"
        text = f"load_words({pointer}, {index}, {size}, {full}, {bits // 8}, {self.aligned(offset, bits)})"
        return f"as_float({text})" if read.element.is_float else text

    # Places in the payload

    def offset(self, p: Procedure, number: int) -> str:
        """Return where a field starts in the body, as text."""
        fixed, moving = 0, []
        for item in p.program.layout.fields[:number]:
            if isinstance(item.type, Scalar):
                fixed += item.type.nbytes
                continue
            assert item.length is not None
            size, bits = self.size(p, item.length), item.type.element.bits
            moving.append(f"tl.cdiv({size}, {8 // bits})" if bits < 8 else f"tl.cast({size}, tl.int64) * {bits // 8}")
        return " + ".join([*moving, str(fixed)]) if moving else str(fixed)

    def aligned(self, offset: str, bits: int) -> str:
        """Return whether a field may be accessed whole: its offset allows it and the caller says the body starts so."""
        *moving, fixed = offset.split(" + ")
        steps = [int(term.rpartition(" * ")[2]) if " * " in term else 1 for term in moving]
        if any(step % (bits // 8) for step in [int(fixed), *steps]):
            return "False"
        self.use_constants("ALIGNED")
        return "ALIGNED"


def fits_tiles(block: int) -> bool:
    """Say whether every tile holds whole blocks of so many elements: tiles have 512 or more, a power of two."""
    return 8 <= block <= 512 and block & (block - 1) == 0
