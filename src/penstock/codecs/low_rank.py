"""Low-rank factors instead of gradients: ACP-SGD, and PowerSGD, whose factors are summed over ranks as they are.

A gradient is seen as a matrix M and sent as the product of two thin ones. F, with orthonormal columns, is what ranks
kept from the iteration before, the same on all of them; orth(X) has orthonormal columns that span what X's do.

    ACP-SGD   (rounds=1)   S = sum_i M_i F                                average S F^T   next time M^T, F = orth(S)
    PowerSGD  (rounds=2)   O = orth(sum_i M_i F)   T = sum_i M_i^T O      average O T^T   next time F = orth(T)

Rank i keeps M_i less its own share of the average, M_i F F^T or O O^T M_i, and adds it the next time: shares add up to
the average, so nothing is lost. (Vogels et al., PowerSGD, 2019; Zhang et al., ACP-SGD, 2023.)

There is no payload: factors lie side by side in one float32 buffer, which any dense all-reduce sums, with gradients
that a product would not make smaller. All functions take numpy arrays or torch tensors. Those on a device are only
queued there: nothing here waits for it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from penstock.codecs.codec import Capabilities, Codec
from penstock.codecs.spec import write_spec
from penstock.errors import CodecError

NAME = "lowrank"
Values = Any  # a numpy array or a torch tensor
Sum = Callable[[Values], None]  # replaces a flat float32 buffer by its sum over all ranks
_SPARE = 1e-6  # how much of other directions columns get before they are made orthonormal: none is then dependent
_SINGLE_THREADED = 1 << 18  # multiplications of a product for which OpenBLAS takes no further thread
_SHIFT = 1e-12  # of Gram matrices, whose columns have norm 1: what rounding may take off their smallest eigenvalue


class LowRank(Codec):
    """The settings of a low-rank exchange; it encodes nothing, and programs of encoded messages cannot carry it."""

    capabilities = Capabilities(sums_factors=True)

    def __init__(self, rank: float = 4, rounds: float = 1, on_nonfinite: str = "raise") -> None:
        """`rank`: columns of each factor; `rounds`: 1 for ACP-SGD, 2 for PowerSGD."""
        if not 1 <= rank < 1 << 31 or rank != int(rank):  # a spec may say inf, nan or any number of digits
            raise CodecError(f"codec {NAME!r}: rank is {rank}; wanted a whole number, 1 or more, such as rank=4")
        if rounds not in (1, 2):
            raise CodecError(f"codec {NAME!r}: rounds is {rounds}; wanted 1 (ACP-SGD) or 2 (PowerSGD)")
        self.rank, self.rounds, self.on_nonfinite = int(rank), int(rounds), on_nonfinite

    @property
    def name(self) -> str:
        """The codec and its settings."""
        return write_spec(NAME, {"rank": self.rank} | ({"rounds": 2} if self.rounds == 2 else {}))

    def gains(self, rows: int, columns: int) -> bool:
        """Say whether both factors of a matrix have fewer elements than it has; then its rank is less than either."""
        return self.rank * (rows + columns) < rows * columns

    def max_nbytes(self, numel: int) -> int:
        """Return the bytes of the factors of an iteration, of a matrix as near to a square as can be."""
        rows, columns = near_square(numel)
        if not self.gains(rows, columns):
            return 4 * numel
        return 4 * self.rank * (rows + columns if self.rounds == 2 else max(rows, columns))

    def encode(self, read: Any, residual: Any, out: Any) -> int:
        """Refuse: there are no payloads."""
        raise self._refusal()

    def decode(self, read: Any, out: Any) -> None:
        """Refuse: there are no payloads."""
        raise self._refusal()

    def decode_add(self, read: Any, out: Any) -> None:
        """Refuse: there are no payloads."""
        raise self._refusal()

    def _refusal(self) -> CodecError:
        return CodecError(f"{self.name} makes no payload: ranks sum factors of matrices; train with it, or measure it")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A gradient of a parcel that is sent as factors."""

    start: int  # first element in the parcel
    rows: int
    columns: int

    def of(self, values: Values) -> Values:
        """Return the matrix in a flat parcel, of the same memory."""
        return values[self.start : self.start + self.rows * self.columns].reshape(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Factor:
    """One side of a product, never written to: what it was before an iteration is still there to go back to."""

    values: Values  # float32, orthonormal columns
    of_rows: bool  # has a row for each row of its matrix, else for each of its columns


class Factoring:
    """Averages a parcel of matrices by their factors; what does not change is found once."""

    def __init__(self, codec: LowRank, matrices: Sequence[Matrix], dense: Sequence[tuple[int, int]]) -> None:
        """`dense`: first and last element of what travels as it is."""
        self.matrices, self._codec = matrices, codec
        self._dense = tuple(_joined(dense))
        self._spares: dict[int, Values] = {}  # by number of rows

    @np.errstate(invalid="ignore", over="ignore")  # `is_finite` tells
    def average(
        self, total: Values, out: Values, factors: Sequence[Factor], add_up: Sum, is_finite: Callable[[Values], bool]
    ) -> list[Factor] | None:
        """Write the sum of all ranks' shares of `total` to `out` and leave in `total` what is not in this rank's.

        Return the factors for the next time. Where a sum is not finite, on all ranks alike, return None, and write NaN
        to gradients of which it is not; `is_finite` may say so later, and True now.
        """
        sides = [not each.of_rows for each in factors]  # that sums have rows for
        buffer, sums, loose = self._lay_out(total, sides, self._dense)
        self._project(total, factors, sums)
        for (start, stop), room in zip(self._dense, loose, strict=True):
            room[:] = total[start:stop]
            total[start:stop] = 0.0
        if self._codec.rounds == 1:
            self._take_off(total, sums, factors)
        add_up(buffer)
        for (start, stop), room in zip(self._dense, loose, strict=True):
            out[start:stop] = room
        if not is_finite(buffer):
            self._refuse(out, sums, is_finite)
            return None
        if self._codec.rounds == 2 and self.matrices:
            factors = self._orthonormal(sums, sides)
            sides = [not each for each in sides]
            buffer, sums, _ = self._lay_out(total, sides, ())
            self._project(total, factors, sums)
            self._take_off(total, sums, factors)
            add_up(buffer)
            if not is_finite(buffer):
                self._refuse(out, sums, is_finite)
                return None
        self._write(out, sums, factors)
        return self._orthonormal(sums, sides)

    def first(self, matrix: Matrix, name: str, like: Values) -> Factor:
        """Return the factor of a first iteration, for a matrix's columns; by its name, so on all ranks alike."""
        drawn = _like(_draw(matrix.columns, self._codec.rank, crc32(name.encode())), like)
        return self._orthonormal([drawn], [False])[0]

    def _lay_out(
        self, like: Values, sides: Sequence[bool], dense: Sequence[tuple[int, int]]
    ) -> tuple[Values, list[Values], list[Values]]:
        """Return a flat buffer, what of it holds a factor of each matrix, and what holds dense gradients."""
        rank = self._codec.rank
        shapes = [each.rows if of_rows else each.columns for each, of_rows in zip(self.matrices, sides, strict=True)]
        sizes = [*(rank * rows for rows in shapes), *(stop - start for start, stop in dense)]
        buffer, parts = _empty(sum(sizes), like), list[Values]()
        start = 0
        for size in sizes:
            parts.append(buffer[start : start + size])
            start += size
        thin = [part.reshape(rows, rank) for part, rows in zip(parts, shapes, strict=False)]
        return buffer, thin, parts[len(shapes) :]

    def _project(self, total: Values, factors: Sequence[Factor], sums: Sequence[Values]) -> None:
        """Write to `sums` the other sides of what this rank has in total."""
        for matrix, factor, thin in zip(self.matrices, factors, sums, strict=True):
            whole = matrix.of(total)
            thin[:] = 0.0
            for rows in _blocks(whole, matrix.columns * self._codec.rank):
                if factor.of_rows:
                    thin += whole[rows].T @ factor.values[rows]
                else:
                    thin[rows] = whole[rows] @ factor.values

    def _take_off(self, total: Values, sums: Sequence[Values], factors: Sequence[Factor]) -> None:
        """Take this rank's share of the average off what it has in total."""
        for matrix, factor, thin in zip(self.matrices, factors, sums, strict=True):
            whole, (one, other) = matrix.of(total), _sides(factor, thin)
            for rows in _blocks(whole, matrix.columns * self._codec.rank):
                whole[rows] -= one[rows] @ other.T

    def _write(self, out: Values, sums: Sequence[Values], factors: Sequence[Factor]) -> None:
        """Write the products of factors, whose other sides are `sums`."""
        for matrix, factor, thin in zip(self.matrices, factors, sums, strict=True):
            whole, (one, other) = matrix.of(out), _sides(factor, thin)
            for rows in _blocks(whole, matrix.columns * self._codec.rank):
                whole[rows] = one[rows] @ other.T

    def _refuse(self, out: Values, sums: Sequence[Values], is_finite: Callable[[Values], bool]) -> None:
        for matrix, thin in zip(self.matrices, sums, strict=True):
            matrix.of(out)[:] = 0.0 if is_finite(thin) else float("nan")

    def _orthonormal(self, sums: Sequence[Values], sides: Sequence[bool]) -> list[Factor]:
        found = orthonormal(sums, [self._spare(each) for each in sums])
        return [Factor(values, of_rows) for values, of_rows in zip(found, sides, strict=True)]

    def _spare(self, like: Values) -> Values:
        """Return directions for columns that depend on others, the same on all ranks."""
        if len(like) not in self._spares:
            self._spares[len(like)] = _wide(_like(_draw(len(like), self._codec.rank, 0), like))
        return self._spares[len(like)]


def orthonormal(matrices: Sequence[Values], spares: Sequence[Values]) -> list[Values]:
    """Return float32 matrices with orthonormal columns that span what those of `matrices` do, with rows >= columns.

    Cholesky-QR, twice, of all matrices together, in float64: the inverse root of X^T X makes X orthonormal. Columns
    that are zero or depend on others get their direction from `spares`, of which all columns have a millionth.
    """
    if not matrices:
        return []
    wide = [_unit_columns(_wide(each)) + _SPARE * spare for each, spare in zip(matrices, spares, strict=True)]
    for _ in range(2):
        roots = _inverse_roots([_gram(each) for each in wide])
        wide = [_times(each, root.T) for each, root in zip(wide, roots, strict=True)]
    return [_narrow(each) for each in wide]


def near_square(numel: int) -> tuple[int, int]:
    """Return rows and columns of a matrix of so many elements, as near to a square as can be.

    >>> near_square(1 << 19)
    (512, 1024)
    """
    rows = next((each for each in range(isqrt(numel), 0, -1) if numel % each == 0), 1)
    return rows, numel // rows


def _blocks(values: Values, work: int) -> Iterator[slice]:
    """Yield some rows at a time of an array, where each takes `work` multiplications; all of a tensor.

    They stay in a core's cache, and BLAS takes no more threads for them than the one that calls: its others would
    compete with the model's and with other ranks (2 MB on two busy cores: 5 ms by one thread, 147 by two).
    """
    step = max(_SINGLE_THREADED // work, 1) if isinstance(values, np.ndarray) else len(values)
    for start in range(0, len(values), step):
        yield slice(start, start + step)


def _gram(matrix: Values) -> Values:
    """Return X^T X."""
    first, *others = (matrix[rows].T @ matrix[rows] for rows in _blocks(matrix, matrix.shape[1] ** 2))
    for each in others:
        first += each
    return first


def _times(matrix: Values, small: Values) -> Values:
    """Return the product of a thin matrix and a square one."""
    if not isinstance(matrix, np.ndarray):
        return matrix @ small
    out = np.empty_like(matrix)
    for rows in _blocks(matrix, matrix.shape[1] ** 2):
        out[rows] = matrix[rows] @ small
    return out


def _unit_columns(matrix: Values) -> Values:
    return matrix / ((matrix * matrix).sum(0) ** 0.5 + 1e-300)


def _draw(rows: int, columns: int, seed: int) -> NDArray[np.float32]:
    """Return uniform values of about norm 1 by column, the same with every version of numpy."""
    raw = np.random.PCG64([seed, rows, columns]).random_raw(rows * columns) >> np.uint64(40)
    uniform = raw.astype(np.float64).reshape(rows, columns) / (1 << 23) - 1.0
    drawn: NDArray[np.float32] = (uniform * (3 / rows) ** 0.5).astype(np.float32)
    return drawn


def _joined(bounds: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield stretches of elements, those side by side as one."""
    first = last = 0
    for start, stop in bounds:
        if start != last and last > first:
            yield first, last
        first, last = (first if start == last and last > first else start), stop
    if last > first:
        yield first, last


def _sides(factor: Factor, other: Values) -> tuple[Values, Values]:
    """Return the factor of rows and that of columns."""
    return (factor.values, other) if factor.of_rows else (other, factor.values)


# What numpy and torch have under other names; torch is there where a tensor is.


def _empty(numel: int, like: Values) -> Values:
    return np.empty(numel, np.float32) if isinstance(like, np.ndarray) else like.new_empty(numel)


def _like(values: NDArray[np.float32], like: Values) -> Values:
    """Return values as `like` is: an array, or a tensor on its device."""
    if isinstance(like, np.ndarray):
        return values
    import torch

    return torch.from_numpy(values).to(like.device)


def _wide(values: Values) -> Values:
    return values.astype(np.float64) if isinstance(values, np.ndarray) else values.double()


def _narrow(values: Values) -> Values:
    return values.astype(np.float32) if isinstance(values, np.ndarray) else values.float()


def _inverse_roots(grams: Sequence[Values]) -> Values:
    """Return the inverses of the lower Cholesky factors; on a device, without a look at what came of it."""
    if isinstance(grams[0], np.ndarray):
        shifted = np.stack(grams) + _SHIFT * np.eye(len(grams[0]))
        return np.linalg.inv(np.linalg.cholesky(shifted))
    import torch

    one = torch.eye(len(grams[0]), dtype=torch.float64, device=grams[0].device)
    lower = torch.linalg.cholesky_ex(torch.stack(list(grams)) + _SHIFT * one).L
    return torch.linalg.solve_triangular(lower, one, upper=False)
