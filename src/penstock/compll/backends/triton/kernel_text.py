"""One Triton kernel as text: its arguments, its names, its parts, and the loop over tiles.

A kernel has a head (scalars every program needs), a loop over its tiles, and, where it reduces, an end that the last
program to finish runs alone: it adds up what the others left, and writes the scalar fields of the payload. So an encode
is as many launches as it has passes. Text only, so that it can be shown and tested without Triton.
"""

import keyword
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.compll.ir import Expr
from penstock.compll.types import BOOL, Kind, Scalar

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "mod": "%", "shl": "<<", "shr": ">>", "and": "&", "or": "|", "xor": "^",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "land": "&", "lor": "|",
}  # fmt: skip
# What generated code says itself; a program's own names step aside.
RESERVED = {
    *keyword.kwlist, "min", "max", "sum", "abs", "range", "float", "int", "load", "store", "words", "uniform", "below",
    "partial", "block", "size", "full", "i", "tl", "triton", "numel", "seed", "factor", "positions", "inside", "worst",
    "latest", "kept", "valid", "start", "word", "on", "wrong", "index", "whole",
}  # fmt: skip
KINDS = {"numel": "i32", "seed": "u64", "factor": "fp32", "units": "i32", "nbytes": "i64"}  # besides pointers
LIMITS = {"smaller": ('float("inf")', "2147483647"), "greater": ('float("-inf")', "-2147483648")}


def literal(expr: Expr) -> str:
    """Return a constant as source; floats are exact in single precision."""
    if not expr.type.is_float:
        return str(int(expr.value))
    text = repr(float(expr.value))
    return f'float("{text}")' if text in ("inf", "-inf", "nan") else text


def register(scalar: Scalar) -> str:
    """Return the type of a scalar in registers: integers of every width share int32."""
    return "tl.float32" if scalar.is_float else "tl.int32"


def tensor(expr: Expr, text: str) -> str:
    """Return an operand as Triton takes it where a Python number will not do."""
    return f"tl.full([], {text}, {register(expr.type)})" if expr.op == "const" else text


def cast(text: str, expr: Expr) -> str:
    """Return a conversion; between integers most are nothing."""
    source, target = expr.args[0].type, expr.type
    if target.is_float:
        return f"{tensor(expr.args[0], text)}.to(tl.float32)"
    if source.is_float:
        return f"to_uint({text}, {target.high})" if target.kind is Kind.UINT else f"to_int({text})"
    if source is BOOL:
        return f"{text}.to(tl.int32)"
    inner = expr.args[0]
    return text if target.low <= inner.low and inner.high <= target.high else f"({text} & {target.high})"


def limit(reducer: str, is_float: bool) -> str:
    """Return where a search for the smallest or the greatest starts."""
    return LIMITS[reducer][0 if is_float else 1]


def wrapped(name: str, arguments: Sequence[str]) -> list[str]:
    """Return the lines of a function's head."""
    text = ", ".join(argument.replace(": ", ":_") for argument in arguments)  # a line ends between arguments
    lines = [line.replace(":_", ": ") for line in textwrap.wrap(text, 110, break_long_words=False)]
    return [f"def {name}(", *(f"    {line}" for line in lines), "):"]


def argument_kind(argument: str) -> str:
    """Return the type an argument is declared to have; pointers have none."""
    if argument.endswith("_ptr"):
        return ""
    return KINDS.get(argument) or ("fp32" if argument.startswith("float_") else "i32")


@dataclass(slots=True)
class KernelText:
    """One kernel while it is written."""

    name: str
    summary: str
    arguments: dict[str, None] = field(default_factory=dict)  # in order of first use
    constants: dict[str, None] = field(default_factory=dict)
    head: list[str] = field(default_factory=list)
    loop: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    helpers: list[str] = field(default_factory=list)  # source of functions that only this kernel calls
    used: set[str] = field(default_factory=lambda: set(RESERVED))

    def use(self, argument: str) -> str:
        """Return an argument of the kernel, declared."""
        self.arguments[argument] = None
        return argument

    def use_constants(self, *names: str) -> None:
        """Declare compile-time arguments."""
        self.constants |= dict.fromkeys(names)

    def fresh(self, hint: str) -> str:
        """Return a local name like `hint` that is still free."""
        hint = hint if hint.isascii() and hint.isidentifier() else "value"
        name, number = (f"{hint}_" if hint in RESERVED else hint), 2
        while name in self.used:
            name, number = f"{hint}_{number}", number + 1
        self.used.add(name)
        return name

    def lines(self, where: str) -> list[str]:
        """Return the part of the kernel that an expression of that kind is written to."""
        return {"scalar": self.head, "end": self.end}.get(where, self.loop)

    def let(self, where: str, hint: str, text: str) -> str:
        """Write `hint = text` and return the name."""
        name = self.fresh(hint)
        self.lines(where).append(f"{name} = {text}")
        return name

    def source(self) -> str:
        """Return the kernel as text; sizes and parameters keep one type, so that none compiles it anew."""
        plain = [name for name in self.arguments if not name.endswith("_ptr")]
        quoted = ", ".join(f'"{name}"' for name in plain)
        decorator = f"@triton.jit(do_not_specialize=[{quoted}])" if plain else "@triton.jit"
        kinds = {name: argument_kind(name) for name in self.arguments}
        arguments = [f'{name}: "{kind}"' if kind else name for name, kind in kinds.items()]
        arguments += [f"{name}: tl.constexpr" for name in self.constants]
        lines = [f'"""{self.summary}"""', *self.head, *self.loop, *self.end]
        kernel = [decorator, *wrapped(self.name, arguments), *(f"    {line}" for line in lines)]
        return "\n\n".join([*self.helpers, "\n".join(kernel) + "\n"])

    # The loop over tiles

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
        self.use_constants("BLOCK", "STAGES")
        fixed = [name for name in self.constants if name in used | {"BLOCK"} - {"STAGES"}]
        declared = ["block", *passed, *carried, "full: tl.constexpr", *(f"{name}: tl.constexpr" for name in fixed)]
        result = [f"return {', '.join(carried)}"] if carried else []
        lines = [f'"""{summary}"""', "i = positions(block, BLOCK)", *self.loop, *result]
        body = [f"    {line}" for line in lines]
        self.helpers.append("\n".join(["@triton.jit", *wrapped(f"{self.name}_tile", declared), *body]) + "\n")
        into = f"{', '.join(carried)} = " if carried else ""

        def call(block: str, full: bool) -> list[str]:
            given = textwrap.wrap(", ".join([block, *passed, *carried, str(full), *fixed]), 105)
            return [f"    {into}{self.name}_tile(", *(f"        {line}" for line in given), "    )"]

        return call
