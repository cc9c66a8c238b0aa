"""The factors that a low-rank exchange starts from, kept by the parameter's name: the same on all ranks.

A factor belongs to one side of a gradient seen as a matrix (`codecs/low_rank.py`). The rows of that matrix are the
parameter's dimension that is outermost in memory, usually its first, and its columns all others, in memory order.

Checkpoints have a factor in logical order: the parameter's shape, with 1 in place of each dimension that is not of this
side, and the number of columns behind. So it fits whatever the memory format is when it is loaded; where it does not
fit any more, as with another rank, it is drawn anew.
"""

from collections.abc import Mapping, Sequence
from math import prod

from penstock.codecs.low_rank import Factor, Factoring, LowRank, Matrix
from penstock.exchange.arrays import Arrays, Buffer, Floats
from penstock.exchange.residuals import Layout


class Factors:
    """Factors by name; none is ever written to, so that going back means to take the old ones."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._kept: dict[str, tuple[Factor, Layout]] = {}
        self._loaded: dict[str, Floats] = {}  # in logical order, until they are asked for
        self._saved: tuple[dict[str, tuple[Factor, Layout]], dict[str, Floats]] = {}, {}

    def of(self, name: str, layout: Layout, matrix: Matrix, factoring: Factoring, rank: int, like: Buffer) -> Factor:
        """Return a parameter's factor where `like` is, drawn where there is none of this rank."""
        if name in self._loaded:
            read = from_logical(self._loaded.pop(name), layout)
            if read is not None:
                self._kept[name] = read, layout
        found = self._kept[name][0] if name in self._kept else None
        if found is None or found.values.shape[1] != rank:
            return factoring.first(matrix, name, like)
        return Factor(self._arrays.float32(found.values, self._arrays.device(like)), found.of_rows)

    def keep(self, names: Sequence[str], layouts: Sequence[Layout], factors: Sequence[Factor]) -> None:
        """Keep what parameters start from the next time."""
        self._kept |= dict(zip(names, zip(factors, layouts, strict=True), strict=True))

    def values(self) -> dict[str, Floats]:
        """Return each parameter's factor in logical order, in host memory."""
        found = {name: self._logical(*pair) for name, pair in self._kept.items()}
        return found | {name: values.copy() for name, values in self._loaded.items()}

    def load(self, values: Mapping[str, Floats]) -> None:
        """Replace all factors by some in logical order; others are drawn when they are needed."""
        self._kept, self._loaded = {}, dict(values)
        self._saved = {}, {}

    def rearrange(self, name: str) -> None:
        """Take note that the parameter lies in memory in another order."""
        if name in self._kept:
            self._loaded[name] = self._logical(*self._kept.pop(name))

    def save(self) -> None:
        """Remember all factors for a `restore`."""
        self._saved = dict(self._kept), dict(self._loaded)

    def restore(self) -> None:
        """Go back to the factors of the last `save`."""
        kept, loaded = self._saved
        self._kept, self._loaded = dict(kept), dict(loaded)

    def _logical(self, factor: Factor, layout: Layout) -> Floats:
        return to_logical(Factor(self._arrays.float32(factor.values, None), factor.of_rows), layout)

    def __getstate__(self) -> tuple[Arrays, dict[str, Floats]]:
        return self._arrays, self.values()

    def __setstate__(self, state: tuple[Arrays, dict[str, Floats]]) -> None:
        self.__init__(state[0])  # type: ignore[misc]
        self.load(state[1])


def matrix_of(layout: Layout, start: int, codec: LowRank) -> Matrix | None:
    """Return a parameter's gradient as a matrix, from its first element in the parcel; None: it travels dense."""
    numel = prod(layout.shape)
    if numel == 0 or (outermost := _outermost(layout)) is None:
        return None
    rows = layout.shape[outermost]
    return Matrix(start, rows, numel // rows) if codec.gains(rows, numel // rows) else None


def to_logical(factor: Factor, layout: Layout) -> Floats:
    """Return a factor in logical order."""
    order, outermost = _order(layout), _outermost(layout)
    sizes = [layout.shape[each] if (each == outermost) == factor.of_rows else 1 for each in order]
    back = sorted(range(len(order)), key=order.__getitem__)
    logical: Floats = factor.values.reshape(*sizes, -1).transpose(*back, len(order)).copy(order="C")
    return logical


def from_logical(values: Floats, layout: Layout) -> Factor | None:
    """Return a factor in memory order; None where it belongs to neither side of the parameter's matrix."""
    order, outermost = _order(layout), _outermost(layout)
    for of_rows in (True, False):
        sizes = [size if (each == outermost) == of_rows else 1 for each, size in enumerate(layout.shape)]
        if values.shape[:-1] == tuple(sizes):
            in_memory = values.transpose(*order, len(order)).reshape(-1, values.shape[-1]).copy(order="C")
            return Factor(in_memory, of_rows)
    return None


def could_be_of(values: Floats, shape: Sequence[int]) -> bool:
    """Say whether values could be a factor of a parameter of this shape."""
    sizes = values.shape[:-1]
    return len(sizes) == len(shape) and all(size in (1, wanted) for size, wanted in zip(sizes, shape, strict=True))


def _order(layout: Layout) -> list[int]:
    """Return the dimensions as they lie in memory, the outermost first; those of size 1 may be anywhere."""
    return sorted(range(len(layout.shape)), key=lambda each: (layout.shape[each] == 1, -layout.strides[each], each))


def _outermost(layout: Layout) -> int | None:
    """Return the dimension whose elements are farthest apart; None where all have one element."""
    return next((each for each in _order(layout) if layout.shape[each] > 1), None)
