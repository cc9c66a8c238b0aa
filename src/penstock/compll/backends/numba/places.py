"""Where the vectors of a pass are while it runs: found before a line of its loop is written."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.compll.backends.numba.expr import Names
from penstock.compll.ir import RESIDUAL, Filter, GroupReduce, Read, element_of
from penstock.compll.lower.passes import INPUTS, TOTAL, Emit, Keep, Pack, Pass, Schedule, block_read, nodes_of
from penstock.compll.types import FLOAT, Scalar

LOOP = 16  # elements that a loop of their own pays for


@dataclass(frozen=True, slots=True)
class Places:
    """What one pass reads, stores, draws and checks."""

    step: Pass
    schedule: Schedule
    names: Names  # identifiers of the kernel
    stored: Mapping[str, str]  # vector computed by the first loop -> array it is left in
    block: int  # n, where the pass reduces by blocks of n or reads `v[i / n]`; else 0
    per_block: Mapping[int, str]  # id of `v[i / n]` -> the vector v
    local: frozenset[str]  # vectors of which only what belongs to this stretch is in memory

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

    def window(self, name: str) -> str:
        """Return the part of a vector's array that belongs to this stretch, as the text of a slice."""
        return ":size" if name in self.local else "start : start + size"

    def of_block(self, name: str) -> str:
        """Return the place of block j of this stretch in the array of a vector with one element for each block."""
        return "j" if name in self.local else f"start // {self.block} + j"

    def blockwise(self) -> list[str]:
        """Return the vectors of which the pass reads one element for each block."""
        return list(dict.fromkeys(self.per_block.values()))

    def streams(self) -> list[tuple[int, Scalar]]:
        """Return the random streams this pass draws from."""
        found = {node.value: node.type for node in nodes_of(self.step) if node.op == "random"}
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


def find_places(
    step: Pass, schedule: Schedule, names: Names, adds: bool, local: frozenset[str] = frozenset()
) -> Places:
    """Return where the vectors of a pass are; `adds` says that decode adds to the output instead of writing it."""
    stored = _stored(step, names, adds)
    block, per_block = _per_block(step, schedule)
    return Places(step, schedule, names, stored, block, per_block, local)


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


def _per_block(step: Pass, schedule: Schedule) -> tuple[int, dict[int, str]]:
    """Find the size of the blocks that a pass reduces, or else reads by, and the reads of `v[i / n]` with that n.

    Few elements are no loop for vector instructions: they are reduced after the loop that computes them.
    """
    groups = [item.group for item in step.outputs if isinstance(item, GroupReduce) and item.group >= LOOP]
    reads = [(node, block_read(node, step, schedule)) for node in nodes_of(step)]
    chosen = next(iter([*groups, *(block for _, block in reads if block)]), 0)
    return chosen, {id(node): node.value for node, block in reads if block == chosen and chosen}
