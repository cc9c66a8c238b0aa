"""The types of the compressor language, and the range of values an integer expression can take.

Unsigned integers are as wide as their name says and are packed to that width on the wire. Arithmetic on integers is
32-bit and wraps, as on every machine; what may not happen silently is narrowing: a value that can leave the range of
the `uintN` it is stored in is a compile error. A float stored in an integer is cut towards zero and held inside the
range (NaN becomes 0), the same on all back ends, so it cannot overflow.
"""

from dataclasses import dataclass
from enum import Enum

MAX_NUMEL = 1 << 30  # elements of one gradient: sizes and indices, and small sums of them, fit an int32


class Kind(Enum):
    """What a scalar's bits mean."""

    BOOL = "bool"
    UINT = "uint"
    INT = "int"
    FLOAT = "float"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar type."""

    name: str
    kind: Kind
    bits: int  # on the wire, inside a vector

    @property
    def low(self) -> int:
        """Smallest integer it holds."""
        return -(1 << 31) if self.kind is Kind.INT else 0

    @property
    def high(self) -> int:
        """Largest integer it holds."""
        return (1 << 31) - 1 if self.kind is Kind.INT else (1 << self.bits) - 1

    @property
    def is_float(self) -> bool:
        """Whether it holds real numbers."""
        return self.kind is Kind.FLOAT

    @property
    def storage(self) -> str:
        """Name of the numpy type that holds one value in memory; below a byte, a byte."""
        if self.kind is Kind.UINT:
            return f"uint{max(8, self.bits)}"
        return {Kind.BOOL: "bool_", Kind.INT: "int32", Kind.FLOAT: "float32"}[self.kind]

    @property
    def nbytes(self) -> int:
        """Bytes one value takes on the wire outside a vector."""
        return max(8, self.bits) // 8

    @property
    def per_byte(self) -> int:
        """Values that share one byte in a packed vector; 1 where a value takes whole bytes."""
        return max(1, 8 // self.bits)


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector of scalars, `uint2*` in the language."""

    element: Scalar

    @property
    def name(self) -> str:
        """As the language writes it."""
        return f"{self.element.name}*"


@dataclass(frozen=True, slots=True)
class ByBlock:
    """One scalar for every `block` neighbouring elements of the gradient, `float[256]` in the language."""

    element: Scalar
    block: int

    @property
    def name(self) -> str:
        """As the language writes it."""
        return f"{self.element.name}[{self.block}]"


BOOL = Scalar("bool", Kind.BOOL, 1)
INT32 = Scalar("int32", Kind.INT, 32)
FLOAT = Scalar("float", Kind.FLOAT, 32)
UINT8 = Scalar("uint8", Kind.UINT, 8)
SCALARS = {
    "uint1": Scalar("uint1", Kind.UINT, 1),
    "uint2": Scalar("uint2", Kind.UINT, 2),
    "uint4": Scalar("uint4", Kind.UINT, 4),
    "uint8": UINT8,
    "uint16": Scalar("uint16", Kind.UINT, 16),
    "int32": INT32,
    "float": FLOAT,
}
Type = Scalar | Vector | ByBlock


def packed_nbytes(element: Scalar, length: int) -> int:
    """Return the bytes of a vector on the wire: values packed from the low bit up, the last byte filled with zeros.

    >>> packed_nbytes(SCALARS["uint2"], 5)
    2
    """
    return (length * element.bits + 7) // 8
