"""The one intermediate form of a compressor: what the front end writes and every back end reads.

A `Program` holds two straight-line procedures, `encode` and `decode`, and the `Layout` of the bytes between them. There
is no control flow: functions are inlined, `if` has become `select`, parameters of type `uintN` are constants (a program
is specialised for them), the others are `param` expressions and stay arguments of the kernels.

- An `Expr` is a scalar computed from others. Inside a vector statement it is evaluated once per element i, and may
  use `element` (element i of a vector), `index` (i) and `random` (element i of a stream, see `philox.py`).
- A `Statement` defines one name: a scalar (`Let`, `Reduce`) or a vector (`Map`, `Filter`, `GroupReduce`, `Apply`,
  `Read`). A vector has an element type and a `Length`; vectors of equal `Length` have equal size, always.
- `Encode.fields` says what goes to each field of the layout: a scalar `Expr` or the name of a vector.
- `Decode.result` names the vector that is the decoded gradient.

Example. This program (onebit with one scale)

    float scale;
    uint1 isUp(float x) { return x >= 0; }
    float back(uint1 up) { return up ? scale : -scale; }
    void encode(float* gradient, uint8* compressed) {
        scale = reduce(map(gradient, abs), sum) / greater(gradient.size, 1);
        compressed = concat(scale, map(gradient, isUp));
    }
    void decode(uint8* compressed, float* gradient) {
        scale = extract(compressed);
        uint1* up = extract(compressed);
        gradient = map(up, back);
    }

becomes (written as `dump` prints it)

    layout
      0 scale: float
      1 isUp: uint1* [gradient]
    encode
      abs[gradient]: float = abs(gradient[i])
      sum: float = reduce sum over gradient of abs[i]
      scale: float = (sum / cast<float>(greater(size(gradient), 1)))
      isUp[gradient]: uint1 = cast<uint1>((gradient[i] >= 0.0))
      field 0 = scale
      field 1 = isUp
    decode
      up[gradient]: uint1 = read field 1
      decoded[gradient]: float = select((cast<int32>(up[i]) != 0), field(0), -field(0))
      result decoded

`fuse.py` turns each procedure into passes over memory: here one for encode (the sum and the bits come out of the same
loop) and one for decode.

Operations of `Expr.op`; arguments of arithmetic and comparisons are both `float` or both `int32`:

    const value | param value=name | name value=scalar's name | field value=index (decode only)
    element value=vector | index | size value=vector | at value=vector (index)
    random value=stream (low, high)          low + u * (high - low), u of element i, or of element 0 in a scalar
    add sub mul div mod neg                  float: IEEE single, never fused; int32: wraps, div and mod cut towards zero
    shl shr and or xor                       int32; shr keeps the sign
    lt le gt ge eq ne | land lor not         bool
    select (bool, yes, no) | call value=function
    cast                                     float to integer: towards zero, held in range, NaN is 0; wider integer to
                                             narrower: low bits; integer to float: nearest
    operand value=0 or 1                     the two values a `fold` reduction combines

`at` holds its index inside the vector, and reads 0 from an empty one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.compll.types import Kind, Scalar, Vector

GRADIENT = "gradient"  # encode's input: what is to be sent, residual included; decode's result
LATEST = "latest"  # encode's second input where a program asks for it: this step's gradient without the residual
RESIDUAL = "residual"  # added to the gradient and left behind where an encode keeps error feedback
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")  # of a program: safe in source, and in the names of files


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """A scalar value; two expressions are the same one only if they are the same object, which is how sharing shows."""

    op: str
    type: Scalar
    args: tuple["Expr", ...] = ()
    value: Any = None
    low: int = 0  # for integers: the range the value is proved to stay in
    high: int = 0
    name: str = ""  # what the source calls it, for readable code


@dataclass(frozen=True, slots=True)
class Length:
    """A vector's size: the gradient's, or that of the vector `of` which is counted at run time; `group` to one."""

    of: str = GRADIENT
    group: int = 1

    def __str__(self) -> str:
        return self.of if self.group == 1 else f"{self.of} / {self.group} up"


NUMEL = Length()


@dataclass(frozen=True, slots=True)
class Let:
    """A scalar that the source names, computed once."""

    name: str
    expr: Expr


@dataclass(frozen=True, slots=True)
class Map:
    """A vector whose element i is `expr`; kept in memory only where something needs it there."""

    name: str
    length: Length
    expr: Expr


@dataclass(frozen=True, slots=True)
class Reduce:
    """A scalar: `smaller`, `greater`, `sum` or `fold` of `expr` over a length; 0 where it is empty.

    A float sum is carried in double precision and rounded once, so its order hardly shows. A smallest or greatest value
    of zero is +0. `fold` combines with `combine`, a function of two operands that must be associative and commutative.
    """

    name: str
    reducer: str
    length: Length
    expr: Expr
    combine: Expr | None = None


@dataclass(frozen=True, slots=True)
class GroupReduce:
    """A vector with one reduction per `group` neighbouring elements; the last group may be short."""

    name: str
    reducer: str  # smaller, greater or sum
    over: Length
    group: int
    expr: Expr

    @property
    def length(self) -> Length:
        """One element for each group."""
        return Length(self.over.of, self.over.group * self.group)


@dataclass(frozen=True, slots=True)
class Filter:
    """A vector of `value` at the elements where `keep` holds, in order; its length is counted."""

    name: str
    over: Length
    keep: Expr
    value: Expr

    @property
    def length(self) -> Length:
        """Counted at run time."""
        return Length(self.name)


@dataclass(frozen=True, slots=True)
class Apply:
    """A vector made by a whole-vector operator of `operators.py` (sort, topk, scatter, ...)."""

    name: str
    operator: str
    element: Scalar
    length: Length
    vectors: tuple[str, ...]
    scalars: tuple[Expr, ...]
    bound: Expr | None = None  # at most so many elements, from sizes and parameters alone; None: as its first vector
    stream: int = 0  # its stream of random numbers where it draws any


@dataclass(frozen=True, slots=True)
class Read:
    """A vector that decode finds in a field."""

    name: str
    field: int
    element: Scalar
    length: Length


Statement = Let | Map | Reduce | GroupReduce | Filter | Apply | Read
VectorStatement = Map | GroupReduce | Filter | Apply | Read


def element_of(statement: VectorStatement) -> Scalar:
    """Return the element type of the vector a statement defines."""
    match statement:
        case Apply() | Read():
            return statement.element
        case Filter():
            return statement.value.type
        case Map() | GroupReduce():
            return statement.expr.type


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the wire format; fields follow one another without gaps."""

    name: str
    type: Scalar | Vector
    length: Length | None = None  # of a vector
    counts: str = ""  # an int32 that `concat` adds: the size of this counted vector, before its first use


@dataclass(frozen=True, slots=True)
class Layout:
    """The wire format: scalars as little-endian bytes, vectors packed from the low bit of each byte up."""

    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class Encode:
    """What encode does; `fields` are its scalars (`Expr`) and vectors (names), one for each field of the layout."""

    statements: tuple[Statement, ...]
    fields: tuple[Expr | str, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """What decode does; `checks` pairs a field with the value it must hold, known from size and parameters."""

    statements: tuple[Statement, ...]
    result: str
    checks: tuple[tuple[int, Expr], ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the program and what it may be."""

    name: str
    type: Scalar
    default: int | float | None
    choices: tuple[int | float, ...]
    interval: tuple[float, float] | None
    value: int | float | None = None  # set where the program is specialised for it; None: an argument of the kernels

    @property
    def is_constant(self) -> bool:
        """Whether programs are specialised for it: it is a `uintN`."""
        return self.type.kind is Kind.UINT


@dataclass(frozen=True, slots=True)
class Program:
    """A compressor, specialised for its constant parameters."""

    name: str
    parameters: tuple[Parameter, ...]
    layout: Layout
    encode: Encode
    decode: Decode
    key: str = ""  # of the cache of programs, where it came from there: changes with all it was made from
    fingerprint: str = ""  # of its text and of the functions and operators it calls: equal on ranks that mean the same

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):  # it stands in generated source and in names of files
            raise ValueError(f"a program's name is {self.name!r}; wanted letters, digits, '.', '-' and '_'")

    @property
    def arguments(self) -> tuple[Parameter, ...]:
        """The parameters that kernels take as arguments, in order."""
        return tuple(parameter for parameter in self.parameters if not parameter.is_constant)


def program_name(path: str) -> str:
    """Return the name of the program in a file: the file's, where what names may not have has become `_`.

    >>> program_name("/home/me/my 3lc.cll")
    'my_3lc'
    """
    return re.sub(r"[^A-Za-z0-9_.-]", "_", Path(path).stem)[:100] or "_"


def called(program: Program) -> tuple[set[str], set[str]]:
    """Return the names of the functions and of the operators that a program calls."""
    statements = (*program.encode.statements, *program.decode.statements)
    roots = [expr for item in statements for expr in expressions(item)]
    roots += [item for item in program.encode.fields if isinstance(item, Expr)]
    functions = {node.value for root in roots for node in walk(root) if node.op == "call"}
    return functions, {item.operator for item in statements if isinstance(item, Apply)}


def walk(expr: Expr) -> Iterator[Expr]:
    """Yield every distinct expression below `expr` and itself, arguments first."""
    seen, path = {id(expr)}, [(expr, iter(expr.args))]
    while path:
        node, left = path[-1]
        for argument in left:
            if id(argument) not in seen:
                seen.add(id(argument))
                path.append((argument, iter(argument.args)))
                break
        else:
            path.pop()
            yield node


def levels(expr: Expr) -> int:
    """Return how deep an expression is nested; what the source gives a name is a level by itself, as in kernels."""
    found: dict[int, int] = {}
    for node in walk(expr):
        found[id(node)] = 1 + max((1 if inner.name else found[id(inner)] for inner in node.args), default=0)
    return found[id(expr)]


def is_static(expr: Expr) -> bool:
    """Whether an expression needs only parameters and the gradient's size: both sides know it before any byte."""
    return all(
        node.op not in ("name", "element", "index", "at", "random", "field")
        and (node.op != "size" or node.value == GRADIENT)
        for node in walk(expr)
    )


def expressions(statement: Statement) -> tuple[Expr, ...]:
    """Return the expressions a statement evaluates."""
    match statement:
        case Let() | Map() | GroupReduce():
            return (statement.expr,)
        case Reduce():
            return (statement.expr,) if statement.combine is None else (statement.expr, statement.combine)
        case Filter():
            return (statement.keep, statement.value)
        case Apply():
            return statement.scalars
        case Read():
            return ()
