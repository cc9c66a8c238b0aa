"""A Triton kernel as text: its arguments, its names, its parts, and the loop over tiles.

A kernel has a head (scalars every program needs), a loop over its tiles, and, where it reduces, an end that the last
program to finish runs alone: it adds up what the others left, and writes the scalar fields of the payload. So an encode
is as many launches as it has passes. Text only, so that it can be shown and tested without Triton.
"""

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.compll.backends.triton.text import RESERVED, argument_kind, wrapped


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
        hint = hint if hint.isidentifier() else "value"
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
