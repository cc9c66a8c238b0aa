"""A `Schedule`: what a kernel does, as passes over memory; `fuse.py` makes it, back ends write loops from it.

`dump` and `show_schedule` print a program and its schedule, as `penstock compile` shows them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.compll.ir import (
    GRADIENT,
    LATEST,
    NUMEL,
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
    VectorStatement,
    element_of,
    expressions,
    walk,
)
from penstock.compll.operators import OPERATORS, Operator
from penstock.compll.types import Scalar

TOTAL = "total"  # gradient + residual
LAST = "last"  # the payload before, where the residual still holds what it carried
INPUTS = (GRADIENT, LATEST, RESIDUAL)


@dataclass(frozen=True, slots=True)
class Pack:
    """Write a vector to a field of the payload, packed."""

    field: int
    vector: str
    element: Scalar


@dataclass(frozen=True, slots=True)
class Keep:
    """Write a vector to memory, for a later step that needs it whole; `to` is its own name, or the residual's."""

    vector: str
    to: str
    element: Scalar


@dataclass(frozen=True, slots=True)
class Emit:
    """Write the decoded gradient to the output, or add a multiple of it."""

    vector: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """Write the decoded gradient as zeros and these values at these indices, or add multiples of the values."""

    indices: str
    values: str


Output = Reduce | GroupReduce | Filter | Pack | Keep | Emit | Scatter


@dataclass(frozen=True, slots=True)
class Pass:
    """One loop over a length: loads, element-wise definitions, and what comes out."""

    length: Length
    inputs: tuple[str, ...]  # vectors loaded from memory (or unpacked from the payload), element by element
    maps: tuple[Map, ...]  # computed per element, in this order
    outputs: tuple[Output, ...]
    check: str = ""  # a vector (input or map) whose elements must be finite, else encode reports it


@dataclass(frozen=True, slots=True)
class Tiled:
    """Passes done together, a stretch of the gradient at a time: whole blocks, so that each finds there what it needs.

    What one pass leaves for the next is still in the cache, or in registers: memory is read once.
    """

    passes: tuple[Pass, ...]
    local: frozenset[str]  # vectors that only these passes read: no more of them is kept than a stretch has


Step = Let | Pass | Tiled | Apply


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a kernel does, in order."""

    steps: tuple[Step, ...]
    vectors: Mapping[str, VectorStatement]  # every vector defined, by name; the inputs are not among them
    subtracts: bool = False  # afterwards decode the payload and subtract it from the residual

    def passes(self, operators: Mapping[str, Operator] = OPERATORS) -> float:
        """Return how often it goes over the gradient's length."""
        total = 0.0
        for step in self.steps:
            if isinstance(step, Tiled) or (isinstance(step, Pass) and step.length == NUMEL):
                total += 1
            elif isinstance(step, Apply) and self.length(step.vectors[0]) == NUMEL:
                total += operators[step.operator].passes
        return total

    def each_pass(self) -> list[Pass]:
        """Return all passes, in order."""
        found = [step.passes if isinstance(step, Tiled) else (step,) for step in self.steps]
        return [step for steps in found for step in steps if isinstance(step, Pass)]

    def length(self, vector: str) -> Length:
        """Return the length of a vector."""
        return NUMEL if vector in INPUTS else self.vectors[vector].length

    def kept(self) -> dict[str, Keep]:
        """Return the vectors that passes leave in memory: a later pass that has one as input finds it there."""
        outputs = [output for step in self.each_pass() for output in step.outputs]
        return {output.vector: output for output in outputs if isinstance(output, Keep)}


def nodes_of(step: Pass) -> list[Expr]:
    """Return every expression that a pass evaluates, and all their parts."""
    exprs = [item.expr for item in step.maps]
    for output in step.outputs:
        if isinstance(output, Reduce | GroupReduce | Filter):
            exprs += expressions(output)
    return [node for expr in exprs for node in walk(expr)]


def block_read(node: Expr, step: Pass, schedule: Schedule) -> int:
    """Return n where a node of a pass reads `v[i / n]` and v has one element for each n; otherwise 0."""
    if node.op != "at" or node.args[0].op != "div" or node.args[0].args[1].op != "const":
        return 0
    index, divisor = node.args[0].args
    indices = {item.name for item in step.maps if item.expr.op == "index"}
    is_index = index.op == "index" or (index.op == "element" and index.value in indices)
    wanted = Length(step.length.of, step.length.group * divisor.value)
    return int(divisor.value) if is_index and schedule.length(node.value) == wanted else 0


def show_schedule(schedule: Schedule) -> str:
    """Return a schedule as text, one step a line."""
    return "".join(f"{_show_step(step)}\n" for step in schedule.steps)


def _show_step(step: Step) -> str:
    match step:
        case Let():
            return f"{step.name} = {show(step.expr)}"
        case Apply():
            return f"{step.name} = {step.operator}({', '.join(step.vectors)})"
        case Tiled():
            return "".join(["stretch by stretch:", *(f"\n  {_show_step(each)}" for each in step.passes)])
        case Pass():
            made = [_show_output(output) for output in step.outputs]
            checks = [f"check {step.check}"] if step.check else []
            return f"pass over {step.length}, reads {', '.join(step.inputs)}: {'; '.join(made + checks)}"


def _show_output(output: Output) -> str:
    match output:
        case Reduce():
            return f"{output.name} = {output.reducer}"
        case GroupReduce():
            return f"{output.name} = {output.reducer} of {output.group}"
        case Filter():
            return f"{output.name} = filter"
        case Pack():
            return f"field {output.field} = {output.vector}"
        case Keep():
            return f"{output.to} = {output.vector}"
        case Emit():
            return f"out = {output.vector}"
        case Scatter():
            return f"out[{output.indices}] = {output.values}"


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "mod": "%", "shl": "<<", "shr": ">>", "and": "&", "or": "|",
    "xor": "^", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "land": "&&", "lor": "||",
}  # fmt: skip


def show(expr: Expr) -> str:
    """Return an expression as text, for people."""
    arguments = [show(argument) for argument in expr.args]
    match expr.op:
        case "const":
            return str(expr.value)
        case "param" | "name":
            return str(expr.value)
        case "element":
            return f"{expr.value}[i]"
        case "at":
            return f"{expr.value}[{arguments[0]}]"
        case "index":
            return "i"
        case "size" | "field" | "operand":
            return f"{expr.op}({expr.value})"
        case "random":
            return f"random{expr.value}({', '.join(arguments)})"
        case "call":
            return f"{expr.value}({', '.join(arguments)})"
        case "cast":
            return f"cast<{expr.type.name}>({arguments[0]})"
        case "neg" | "not":
            return ("-" if expr.op == "neg" else "!") + arguments[0]
        case op if op in _INFIX:
            return f"({arguments[0]} {_INFIX[op]} {arguments[1]})"
    return f"{expr.op}({', '.join(arguments)})"


def _show_statement(statement: Statement) -> str:
    match statement:
        case Let():
            return f"{statement.name}: {statement.expr.type.name} = {show(statement.expr)}"
        case Reduce():
            over = f"over {statement.length} of {show(statement.expr)}"
            return f"{statement.name}: {statement.expr.type.name} = reduce {statement.reducer} {over}"
    head = f"{statement.name}[{statement.length}]: {element_of(statement).name} = "
    match statement:
        case Map():
            return head + show(statement.expr)
        case GroupReduce():
            return head + f"reduce {statement.reducer} of {show(statement.expr)} in groups of {statement.group}"
        case Filter():
            return head + f"{show(statement.value)} where {show(statement.keep)} over {statement.over}"
        case Apply():
            operands = [*statement.vectors, *(show(scalar) for scalar in statement.scalars)]
            return head + f"{statement.operator}({', '.join(operands)})"
        case Read():
            return head + f"read field {statement.field}"


def dump(program: Program) -> str:
    """Return the whole program as text, one definition a line."""
    lines = ["layout"]
    for number, field in enumerate(program.layout.fields):
        size = f" [{field.length}]" if field.length else ""
        lines.append(f"  {number} {field.name}: {field.type.name}{size}")
    lines.append("encode")
    lines += [f"  {_show_statement(statement)}" for statement in program.encode.statements]
    for number, source in enumerate(program.encode.fields):
        lines.append(f"  field {number} = {source if isinstance(source, str) else show(source)}")
    lines.append("decode")
    lines += [f"  {_show_statement(statement)}" for statement in program.decode.statements]
    lines += [f"  check field {number} == {show(expr)}" for number, expr in program.decode.checks]
    lines.append(f"  result {program.decode.result}")
    return "\n".join(lines) + "\n"
