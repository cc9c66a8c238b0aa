"""A `Schedule`: what a kernel does, as passes over memory; `fuse.py` makes it, back ends write loops from it."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.compll.ir import (
    GRADIENT,
    LATEST,
    NUMEL,
    RESIDUAL,
    Apply,
    Filter,
    GroupReduce,
    Length,
    Let,
    Map,
    Reduce,
    VectorStatement,
)
from penstock.compll.operators import OPERATORS, Operator
from penstock.compll.show import show
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


Step = Let | Pass | Apply


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
            if isinstance(step, Pass) and step.length == NUMEL:
                total += 1
            elif isinstance(step, Apply) and self.length(step.vectors[0]) == NUMEL:
                total += operators[step.operator].passes
        return total

    def length(self, vector: str) -> Length:
        """Return the length of a vector."""
        return NUMEL if vector in INPUTS else self.vectors[vector].length

    def kept(self) -> dict[str, Keep]:
        """Return the vectors that passes leave in memory: a later pass that has one as input finds it there."""
        outputs = [output for step in self.steps if isinstance(step, Pass) for output in step.outputs]
        return {output.vector: output for output in outputs if isinstance(output, Keep)}


def show_schedule(schedule: Schedule) -> str:
    """Return a schedule as text, one step a line."""
    return "".join(f"{_show_step(step)}\n" for step in schedule.steps)


def _show_step(step: Step) -> str:
    match step:
        case Let():
            return f"{step.name} = {show(step.expr)}"
        case Apply():
            return f"{step.name} = {step.operator}({', '.join(step.vectors)})"
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
