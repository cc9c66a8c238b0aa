"""Short names for the stretches of data that messages carry: a, b, c as in Wang et al., Fig. 2."""

from bisect import bisect_left
from collections.abc import Iterable

from penstock.program import Collective, Program
from penstock.verify import Carried

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
