"""Values, variables and scopes while a program is compiled, and the statements written so far."""

from dataclasses import dataclass, field

from penstock.compll.frontend.scalar_ops import binary, convert, integer
from penstock.compll.ir import Expr, Length, Let, Map, Statement, walk
from penstock.compll.types import BOOL, INT32, MAX_NUMEL, SCALARS, Scalar, Type, Vector


@dataclass(frozen=True, slots=True)
class VectorRef:
    """A vector by name, with what its elements are proved to be.

    `by_block`: it has one value for each block of the gradient, and stands for the value of the block at hand where a
    scalar is wanted.
    """

    name: str
    element: Scalar
    length: Length
    low: int = 0
    high: int = 0
    by_block: bool = False

    @property
    def type(self) -> Vector:
        """Its type in the language."""
        return Vector(self.element)

    def at_i(self) -> Expr:
        """Element i."""
        return Expr("element", self.element, value=self.name, low=self.low, high=self.high)

    def of_block(self, over: Length) -> Expr | None:
        """The value for element i of a length: its block's; None where the length is not cut into these blocks."""
        if self.length == over:
            return self.at_i()
        if self.length.of != over.of or self.length.group % over.group:
            return None
        index = Expr("index", INT32, low=0, high=MAX_NUMEL - 1)
        block = binary("/", index, integer(self.length.group // over.group))
        return Expr("at", self.element, (block,), self.name, self.low, self.high)


@dataclass(frozen=True, slots=True)
class ParamsRef:
    """The parameters of a block: the argument `params`, or the block's own name."""

    block: str


@dataclass(frozen=True, slots=True)
class Compressed:
    """The bytes that encode writes and decode reads."""


Value = Expr | VectorRef | ParamsRef | Compressed


@dataclass(slots=True)
class Slot:
    """A variable: its declared type and what it holds now."""

    type: Type | None  # None for `compressed` and parameters
    value: Value | None


@dataclass(slots=True)
class Scope:
    """Variables by name."""

    slots: dict[str, Slot] = field(default_factory=dict)

    def find(self, name: str) -> Slot | None:
        """Return a variable; None where there is none of that name."""
        return self.slots.get(name)

    def names(self) -> list[str]:
        """Every name in sight."""
        return list(self.slots)

    def copy(self) -> "Scope":
        """Return a scope whose variables can be assigned without touching this one's."""
        return Scope({name: Slot(slot.type, slot.value) for name, slot in self.slots.items()})


@dataclass(slots=True)
class Writer:
    """The statements of one procedure, with unique names."""

    statements: list[Statement] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)  # names to write instead of the source's
    streams: int = 0

    def fresh(self, hint: str) -> str:
        """Return `hint`, or `hint_2`, ... where it is taken."""
        hint = self.aliases.get(hint, hint)
        name, number = hint, 2
        while name in self.used:
            name, number = f"{hint}_{number}", number + 1
        self.used.add(name)
        return name

    def map(self, hint: str, length: Length, expr: Expr) -> VectorRef:
        """Write a vector whose element i is `expr` and return it."""
        if expr.type is BOOL:
            expr = convert(expr, SCALARS["uint1"])
        name = self.fresh(hint)
        self.statements.append(Map(name, length, expr))
        return VectorRef(name, expr.type, length, expr.low, expr.high)

    def length(self, vector: str) -> Length:
        """Return the length of a vector that a statement has made."""
        found = next(item for item in self.statements if item.name == vector)
        assert not isinstance(found, Let)
        return found.length

    def stream(self) -> int:
        """Return the next stream of random numbers."""
        self.streams += 1
        return self.streams - 1


def blocks_read(expr: Expr) -> list[str]:
    """Return the vectors by block that an expression of a body reads."""
    return [node.value for node in walk(expr) if node.op == "element"]


def size_of(length: Length) -> Expr:
    """Return the number of elements of a length, as an expression."""
    whole = Expr("size", INT32, value=length.of, low=0, high=MAX_NUMEL)
    if length.group == 1:
        return whole
    return binary("/", binary("+", whole, integer(length.group - 1)), integer(length.group))


def length_of(size: Expr) -> Length | None:
    """Return the length that an expression spells: `v.size`, or `(v.size + g - 1) / g`; None for anything else."""
    if size.op == "size":
        return Length(size.value)
    if size.op != "div" or size.args[0].op != "add" or size.args[1].op != "const":
        return None
    whole, more = size.args[0].args
    group = size.args[1].value
    if whole.op == "size" and more.op == "const" and more.value == group - 1:
        return Length(whole.value, group)
    return None
