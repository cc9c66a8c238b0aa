"""Where the vectors of a pass are while it runs: found before a line of its loop is written."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.compll.backends.numba_expr import Names
from penstock.compll.ir import RESIDUAL, Expr, Filter, GroupReduce, Length, Read, Reduce, element_of, expressions, walk
from penstock.compll.schedule import INPUTS, TOTAL, Emit, Keep, Pack, Pass, Schedule
from penstock.compll.types import FLOAT, Scalar


@dataclass(frozen=True, slots=True)
class Places:
    """What one pass reads, stores, draws and checks."""

    step: Pass
    schedule: Schedule
    names: Names  # identifiers of the kernel
    stored: Mapping[str, str]  # vector computed by the first loop -> array it is left in
    group: int  # n of the reads below
    per_group: Mapping[int, str]  # id of `v[i / n]` -> the vector v, spread over the block

    def in_memory(self, array: str) -> bool:
        """Whether a stored vector's array is a part of one that outlives the pass."""
        kept = [output.to for output in self.step.outputs if isinstance(output, Keep)]
        return array in ("out_b", f"{RESIDUAL}_b") or array in {f"{self.names.of(name)}_b" for name in kept}

    def element(self, name: str) -> Scalar:
        """Return the type of a vector's elements."""
        vector = self.schedule.vectors.get(name)
        return FLOAT if vector is None else element_of(vector)

    def is_kept(self, name: str) -> bool:
        """Whether an earlier pass left a vector in memory."""
        return name in self.schedule.kept() and name not in self.stored

    def unpacks(self, name: str) -> bool:
        """Whether a vector is a field of the payload that needs unpacking; bytes are read where they are."""
        vector = self.schedule.vectors.get(name)
        return isinstance(vector, Read) and vector.element.bits != 8 and not self.is_kept(name)

    def spread(self) -> list[str]:
        """Return the vectors that have one element for each group."""
        return list(dict.fromkeys(self.per_group.values()))

    def streams(self) -> list[tuple[int, Scalar]]:
        """Return the random streams this pass draws from."""
        found = {node.value: node.type for node in _nodes(self.step) if node.op == "random"}
        return sorted(found.items())

    def checked(self) -> list[str]:
        """Return the vectors whose elements must be finite: the gradient, and floats that are sent or received."""
        found = [self.step.check] if self.step.check else []
        found += [output.vector for output in self.step.outputs if isinstance(output, Pack) and output.element == FLOAT]
        for name in self.step.inputs:
            vector = self.schedule.vectors.get(name)
            if isinstance(vector, Read) and vector.element == FLOAT and not self.is_kept(name):
                found.append(name)
        return list(dict.fromkeys(found))


def find_places(step: Pass, schedule: Schedule, names: Names, adds: bool) -> Places:
    """Return where the vectors of a pass are; `adds` says that decode adds to the output instead of writing it."""
    stored = _stored(step, names, adds)
    group, per_group = _per_group(step, schedule)
    return Places(step, schedule, names, stored, group, per_group)


def _stored(step: Pass, names: Names, adds: bool) -> dict[str, str]:
    """Decide which vectors the first loop stores, and where."""
    stored: dict[str, str] = {}
    for output in step.outputs:
        match output:
            case Keep():
                stored[output.vector] = f"{names.of(output.to) if output.to not in INPUTS else output.to}_b"
            case Emit() if not adds:
                stored.setdefault(output.vector, "out_b")
    for output in step.outputs:
        if isinstance(output, Pack) and _needs_copy(step, output):
            stored.setdefault(output.vector, f"{names.of(output.vector)}_b")
    replaced = any(isinstance(output, Keep) and output.to == RESIDUAL for output in step.outputs)
    later = any(isinstance(output, Filter) for output in step.outputs)
    if replaced and later and any(item.name == TOTAL for item in step.maps):
        stored.setdefault(TOTAL, "total_b")  # filters come after the residual is overwritten
    return stored


def _needs_copy(step: Pass, output: Pack) -> bool:
    """Whether a vector is not already in memory as it is to be sent."""
    return output.element.bits < 8 or any(item.name == output.vector for item in step.maps)


def _per_group(step: Pass, schedule: Schedule) -> tuple[int, dict[int, str]]:
    """Find reads of `v[i / n]` where v has one element for each n: it is spread over the block first."""
    indices = {item.name for item in step.maps if item.expr.op == "index"}
    chosen, found = 0, {}
    for node in _nodes(step):
        group = _group_of(node, indices, step.length, schedule)
        if group and chosen in (0, group):
            chosen, found[id(node)] = group, node.value
    return chosen, found


def _group_of(node: Expr, indices: set[str], length: Length, schedule: Schedule) -> int:
    """Return n where a node reads `v[i / n]` and v has one element for each n; otherwise 0."""
    if node.op != "at" or node.args[0].op != "div" or node.args[0].args[1].op != "const":
        return 0
    index, divisor = node.args[0].args
    is_index = index.op == "index" or (index.op == "element" and index.value in indices)
    wanted = Length(length.of, length.group * divisor.value)
    return divisor.value if is_index and schedule.length(node.value) == wanted else 0


def _nodes(step: Pass) -> list[Expr]:
    """Return every expression the pass evaluates, and all their parts."""
    exprs = [item.expr for item in step.maps]
    for output in step.outputs:
        if isinstance(output, Reduce | GroupReduce | Filter):
            exprs += expressions(output)
    return [node for expr in exprs for node in walk(expr)]
