"""Draws a program in the terminal: steps down, ranks across, in each cell what the rank sends and to whom.

The stretches of data that messages carry have short names, a, b, c as in Wang et al., Fig. 2.
"""

from bisect import bisect_left
from collections.abc import Iterable

from penstock.program import Collective, Program
from penstock.verify import Carried, Proof

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SUMS = (Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER)


class BlockLabels:
    """Names every stretch between two cuts that some message makes."""

    def __init__(self, program: Program, carried: Iterable[Carried]) -> None:
        self._cuts = sorted({edge for one in carried for edge in one.elements})
        self._everyone = (1 << program.world_size) - 1 if program.collective in _SUMS else None
        self.count = max(len(self._cuts) - 1, 0)

    def first(self, message: Carried) -> int:
        """Return the number of the first stretch that a message carries."""
        return bisect_left(self._cuts, message.elements[0])

    def label(self, message: Carried) -> str:
        """Return the name of what a message carries; capitals, or a star, for a finished sum.

        Stretches have letters where there are enough: `ab` is the first two, `a-f` the first six.
        """
        low, high = self.first(message), bisect_left(self._cuts, message.elements[1]) - 1
        names = [self._name(index) for index in (range(low, high + 1) if high - low < 3 else (low, high))]
        by_letter = self.count <= len(_LETTERS)
        text = (
            names[0] if high == low else "".join(names) if by_letter and high - low < 3 else f"{names[0]}-{names[-1]}"
        )
        if not self.finished(message):
            return text
        return text.upper() if by_letter else f"{text}*"

    def finished(self, message: Carried) -> bool:
        """Say whether a message carries sums that no rank is missing from."""
        return message.contributors == self._everyone

    def _name(self, index: int) -> str:
        return _LETTERS[index] if self.count <= len(_LETTERS) else str(index)


_EMPTY = "."


def draw_text(program: Program, proof: Proof, max_steps: int = 40, width: int = 120) -> str:
    """Return the drawing; steps beyond `max_steps` and ranks beyond `width` characters are counted, not drawn.

    step  rank 0  rank 1  rank 2
       1  a > 1   b > 2   c > 0
       2  c > 1   a > 2   b > 0
    """
    cells = _cells(program, proof)
    size = max([len(f"rank {program.world_size - 1}"), *(len(cell) for cell in cells.values())])
    ranks = range(min(program.world_size, max((width - 6) // (size + 2), 1)))
    lines = ["step  " + "  ".join(f"rank {rank}".ljust(size) for rank in ranks)]
    for step in range(1, min(proof.steps, max_steps) + 1):
        lines.append(f"{step:4}  " + "  ".join(cells.get((step, rank), _EMPTY).ljust(size) for rank in ranks))
    hidden = [(proof.steps - max_steps, "steps"), (program.world_size - len(ranks), "ranks")]
    rest = [f"{count} more {what}" for count, what in hidden if count > 0]
    return "\n".join(line.rstrip() for line in [*lines, *([f"... {', '.join(rest)}"] if rest else [])])


def _cells(program: Program, proof: Proof) -> dict[tuple[int, int], str]:
    labels = BlockLabels(program, proof.carried)
    return {(one.step, one.source): f"{labels.label(one)} > {one.target}" for one in proof.carried}
