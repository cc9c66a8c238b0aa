"""Expressions and reductions of the IR as Python text that numba compiles to the same bits as the reference.

For a smallest or greatest value, floats are compared as integers of the same order. Sums are in single precision within
a block, in double precision over blocks.
"""

import keyword
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.compll.ir import Expr, GroupReduce, Map, Reduce, walk
from penstock.compll.types import BOOL, Kind, Scalar

INFIX = {"add": "+", "sub": "-", "mul": "*", "shl": "<<", "shr": ">>", "and": "&", "or": "|", "xor": "^"}
COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "land": "&", "lor": "|"}
LEAVES = ("const", "param", "name", "field", "element", "index", "size", "operand")
# What generated code says itself; a program's own names step aside.
OWN = frozenset(
    {
        *("np", "njit", "float32", "float64", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "range"),
        *(
            "gradient",
            "residual",
            "source",
            "out",
            "payload",
            "seed_low",
            "seed_high",
            "factor",
            "numel",
            "worst",
            "worst_b",
        ),
        *(
            "start",
            "size",
            "i",
            "j",
            "first",
            "last",
            "place",
            "words",
            "word",
            "index",
            "left",
            "right",
            "magnitude",
            "lane",
            "bad",
        ),
    }
)


@dataclass(slots=True)
class Names:
    """Identifiers of one kernel: readable, valid, and each of one meaning."""

    reserved: frozenset[str]
    given: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def of(self, name: str) -> str:
        """Return the identifier of a scalar or vector of the program."""
        if name not in self.given:
            self.given[name] = self.unique(name)
        return self.given[name]

    def of_bytes(self, name: str) -> str:
        """Return the identifier of a vector's bytes in the payload."""
        key = f"{name} in the payload"
        if key not in self.given:
            self.given[key] = self.unique(f"{name}_bytes")
        return self.given[key]

    def unique(self, hint: str) -> str:
        """Return an identifier that is not in use."""
        assert hint.isascii(), f"{hint!r} is to stand in generated source"
        assert hint.isidentifier(), f"{hint!r} is to stand in generated source"
        made = hint
        while made in self.used or made in self.reserved or made in OWN or keyword.iskeyword(made):
            made += "_"
        self.used.add(made)
        return made


@dataclass(slots=True)
class Body:
    """The statements of one loop body (or of straight-line scalars), written as expressions ask for them."""

    names: Names
    element: Callable[[str], str | None]  # text of element i of a vector that is in memory; None for a map
    maps: Mapping[str, Map]  # computed here where needed
    fields: Mapping[int, str]  # identifiers of decode's scalar fields
    sizes: Callable[[str], str]  # text of a vector's size
    index: str = "int32(start + i)"
    in_loop: bool = True
    constant: Mapping[int, str] = field(default_factory=dict)  # id of an expression that the loop does not change
    lines: list[str] = field(default_factory=list)
    known: dict[int, str] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)  # maps computed so far
    alive: list[Expr] = field(default_factory=list)  # ids in `known` stay theirs

    def value(self, expr: Expr) -> str:
        """Return text for an expression; what is shared or has a name becomes a variable first."""
        uses = Counter(id(argument) for node in walk(expr) for argument in node.args)
        for node in walk(expr):
            if id(node) in self.known:
                continue
            self.alive.append(node)
            text = self.constant.get(id(node)) or self._text(node)
            if node is not expr and node.op not in LEAVES and (uses[id(node)] > 1 or node.name):
                text = self._variable(node.name or "t", text)
            self.known[id(node)] = text
        return self.known[id(expr)]

    def _variable(self, hint: str, text: str) -> str:
        name = self.names.unique(hint)
        self.lines.append(f"{name} = {bare(text)}")
        return name

    def vector(self, name: str) -> str:
        """Return text for element i of a vector."""
        loaded = self.element(name)
        if loaded is not None:
            return loaded
        if name not in self.computed:
            text = self.value(self.maps[name].expr)
            simple = text.isidentifier() or text == self.index
            self.computed[name] = text if simple else self._variable(name, text)
        return self.computed[name]

    def _text(self, expr: Expr) -> str:
        args = [self.known[id(argument)] for argument in expr.args]
        match expr.op:
            case "const":
                return f"{constructor(expr.type)}({expr.value!r})"
            case "param" | "name":
                return self.names.of(expr.value)
            case "field":
                return self.fields[expr.value]
            case "element":
                return self.vector(expr.value)
            case "index":
                return self.index
            case "size":
                return f"int32({self.sizes(expr.value)})"
            case "at":
                return f"read_at({self.names.of(expr.value)}, {args[0]}, {constructor(expr.type)}(0))"
            case "operand":
                return ("left", "right")[expr.value]
            case "random":
                return self._random(expr, args)
            case "call":
                return f"{expr.value}({', '.join(args)})"
            case "cast":
                return cast(args[0], expr.args[0], expr.type)
        return operation(expr, args)

    def _random(self, expr: Expr, args: list[str]) -> str:
        key = f"seed_low, seed_high, {expr.value}"
        if not expr.type.is_float:
            word = f"words_{expr.value}[i]" if self.in_loop else f"first_word({key})"
            return f"random_int32({word}, {', '.join(args)})"
        number = f"uniform_{expr.value}[i]" if self.in_loop else f"first_uniform({key})"
        low, high = expr.args
        if low.op == high.op == "const" and (low.value, high.value) == (0, 1):
            return number
        return f"({args[0]} + {number} * ({args[1]} - {args[0]}))"


def constructor(scalar: Scalar) -> str:
    """Return numba's name of a scalar's type in memory."""
    return "bool" if scalar is BOOL else scalar.storage


def operation(expr: Expr, args: list[str]) -> str:
    """Return an operation on values; int32 is cut back to 32 bits, float32 stays single without help."""
    if expr.op == "select":
        return f"({args[1]} if {args[0]} else {args[2]})"
    if expr.op == "not":
        return f"(not {args[0]})"
    if expr.op in COMPARE:
        return f"({args[0]} {COMPARE[expr.op]} {args[1]})"
    if expr.op == "neg":
        return f"(-{args[0]})" if expr.type.is_float else f"int32(-{args[0]})"
    if expr.op in ("div", "mod") and not expr.type.is_float:
        plain = expr.args[0].low >= 0 and expr.args[1].low > 0
        symbol = "//" if expr.op == "div" else "%"
        return f"int32({args[0]} {symbol} {args[1]})" if plain else f"cut_{expr.op}({args[0]}, {args[1]})"
    text = f"{args[0]} {'/' if expr.op == 'div' else INFIX[expr.op]} {args[1]}"
    return f"({text})" if expr.type.is_float else f"int32({text})"


def cast(text: str, source: Expr, target: Scalar) -> str:
    """Return a value as another type."""
    if source.type.is_float:
        if target.kind is Kind.INT:
            return f"to_int32({text})"
        return f"to_{target.storage}({text}, float32({target.high}.0))"
    if source.type is not BOOL and target.kind is Kind.UINT and source.high > target.high:
        return f"{target.storage}({text} & {target.high})"
    if source.type is not BOOL and target.kind is Kind.UINT and source.low < 0:
        return f"{target.storage}({text} & {target.high})"
    return f"{constructor(target)}({bare(text)})"


def bare(text: str) -> str:
    """Return text without parentheses around the whole of it.

    >>> bare("(a + b)"), bare("(a) + (b)")
    ('a + b', '(a) + (b)')
    """
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and place < len(text) - 1:
            return text
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def start_value(output: Reduce) -> str:
    """Return the initial value of a reduction over all blocks, as text."""
    if output.reducer == "sum":
        return "0.0" if output.expr.type.is_float else "int32(0)"
    if output.reducer == "fold":
        return f"{constructor(output.expr.type)}(0)"
    return "int32(2147483647)" if output.reducer == "smaller" else "int32(-2147483648)"


def block_start(output: Reduce) -> str:
    """Return the initial value of a reduction over one block, as text."""
    return "float32(0)" if output.reducer == "sum" and output.expr.type.is_float else start_value(output)


def step_lines(output: Reduce, name: str, text: str) -> list[str]:
    """Return the lines that add one element to a reduction."""
    if output.reducer == "sum":
        return [f"{name} = add({name}, {text})" if output.expr.type.is_float else f"{name} = int32({name} + {text})"]
    sign = "<" if output.reducer == "smaller" else ">"
    key = f"order_key({text})" if output.expr.type.is_float else text
    return [f"{name}_k = {key}", f"{name} = {name}_k if {name}_k {sign} {name} else {name}"]


def join_lines(output: Reduce, name: str) -> list[str]:
    """Return the lines that add one block's result to a reduction."""
    if output.reducer == "sum":
        return [f"{name} += float64({name}_b)" if output.expr.type.is_float else f"{name} = int32({name} + {name}_b)"]
    sign = "<" if output.reducer == "smaller" else ">"
    return [f"{name} = {name}_b if {name}_b {sign} {name} else {name}"]


def final_lines(output: Reduce, name: str, size: str) -> list[str]:
    """Return the lines that turn the accumulator into the reduction's value."""
    if output.reducer == "fold":
        return []
    if output.reducer == "sum":
        return [f"{name} = float32({name})"] if output.expr.type.is_float else []
    if output.expr.type.is_float:
        return [f"{name} = key_value({name}, {size})"]
    return [f"{name} = {name} if {size} > 0 else int32(0)"]


def group_start(output: GroupReduce) -> str:
    """Return the initial value of one group's reduction, as text."""
    if output.reducer == "sum":
        return "0.0" if output.expr.type.is_float else "int32(0)"
    return "int32(2147483647)" if output.reducer == "smaller" else "int32(-2147483648)"


def group_lines(output: GroupReduce, name: str, text: str) -> list[str]:
    """Return the lines that add one element to a group's reduction."""
    if output.reducer == "sum" and output.expr.type.is_float:
        return [f"{name} = add({name}, float64({text}))"]
    return step_lines(Reduce(output.name, output.reducer, output.over, output.expr), name, text)


def group_value(output: GroupReduce, name: str) -> str:
    """Return the value of a group's reduction, as text."""
    if not output.expr.type.is_float:
        return name
    return f"float32({name})" if output.reducer == "sum" else f"key_value({name}, 1)"
