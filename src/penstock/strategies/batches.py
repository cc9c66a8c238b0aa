"""Partition, then compress, then batch: which pieces of which tensors travel together (HiPress, section 3).

A codec must see the same values whatever bucket a tensor is in, or merging would change the training. So each tensor
is cut into pieces by itself; each piece is encoded by itself, with a scale of its own; and only then are payloads
put together into batches that travel as one message. How a tensor is cut, and which chunk of the strategy each piece
belongs to, depends on its size and on options, never on its neighbours.

    tensors A (10 elements) and B (6) in one bucket, two chunks, K = 2

    bucket    A0 A0 A0 A0 A0 A1 A1 A1 A1 A1 B0 B0 B0 B1 B1 B1
    chunk 0   batch 0: A0 B0
    chunk 1   batch 1: A1 B1

A program for compressed data counts batches where others count elements: its position p is batch p. As no message may
cut an element, none can cut a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import StrategyError

LARGEST_PIECE = 1024 * 1024  # elements; encoding one overlaps sending the one before
SMALLEST_PIECE = 1024  # elements; a smaller one would be more header than data
GRAIN = 128  # elements; tensors are cut at multiples of it, so that pieces begin where vectors of a processor do

Piece = tuple[int, int]  # first element, and one past the last


@dataclass(frozen=True, slots=True)
class Batches:
    """The pieces of each batch, by their place in the bucket, in the order in which programs count batches."""

    numel: int  # elements of the bucket
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def empty(self) -> frozenset[int]:
        """Batches without a piece, about which nothing needs to be sent."""
        return frozenset(index for index, pieces in enumerate(self.pieces) if not pieces)

    @property
    def filled(self) -> "Batches":
        """These batches without the empty ones."""
        return Batches(self.numel, tuple(pieces for pieces in self.pieces if pieces))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each batch."""
        return tuple(sum(stop - start for start, stop in pieces) for pieces in self.pieces)


def make_batches(
    bounds: Sequence[int], chunks: int, partitions: int | None, block_numel: int, waves: bool = False
) -> Batches:
    """Cut the tensors between consecutive `bounds` into pieces and sort these into batches.

    `chunks` is how many equal parts the strategy cuts data into; it gets the same number of batches for each, chunk by
    chunk, or with `waves` first one of each chunk, then another of each. A batch has about `block_numel` elements.
    """
    _check_bounds(bounds)
    by_chunk: list[list[Piece]] = [[] for _ in range(chunks)]
    for start, stop in pairwise(bounds):
        count = piece_count(stop - start, chunks, partitions)
        for index, (low, high) in enumerate(cut(stop - start, count)):
            if low < high:
                by_chunk[index * chunks // count].append((start + low, start + high))
    per_chunk = max((_batch_count(pieces, block_numel) for pieces in by_chunk), default=0)
    grouped = [_group(pieces, per_chunk) for pieces in by_chunk]
    if waves:
        return Batches(bounds[-1], tuple(grouped[chunk][turn] for turn in range(per_chunk) for chunk in range(chunks)))
    return Batches(bounds[-1], tuple(pieces for groups in grouped for pieces in groups))


def one_batch(bounds: Sequence[int]) -> Batches:
    """Put the tensors between consecutive `bounds` into one batch, none of them cut.

    >>> one_batch([0, 3, 3, 10])
    Batches(numel=10, pieces=(((0, 3), (3, 10)),))
    """
    _check_bounds(bounds)
    pieces = tuple((low, high) for low, high in pairwise(bounds) if low < high)
    return Batches(bounds[-1], (pieces,) if pieces else ())


def piece_count(numel: int, chunks: int, partitions: int | None) -> int:
    """Return into how many pieces a tensor is cut: `partitions`, or one per chunk and more where those are large.

    >>> [piece_count(numel, 4, None) for numel in (10, 5000, 8 << 20)]
    [1, 4, 8]
    """
    wanted = partitions or chunks * max(1, -(-numel // (chunks * LARGEST_PIECE)))
    return max(1, min(wanted, numel // SMALLEST_PIECE))


def cut(numel: int, count: int) -> list[Piece]:
    """Cut a tensor into pieces as even as whole grains allow.

    >>> cut(5000, 4)
    [(0, 1152), (1152, 2432), (2432, 3712), (3712, 5000)]
    """
    edges = [*(numel * part // count // GRAIN * GRAIN for part in range(count)), numel]
    return list(pairwise(edges))


def _check_bounds(bounds: Sequence[int]) -> None:
    if len(bounds) < 2 or bounds[0] != 0 or any(low > high for low, high in pairwise(bounds)):
        raise StrategyError(f"parts {list(bounds)[:8]}; wanted 0, the end of each tensor in order, ..., all elements")


def _batch_count(pieces: Sequence[Piece], block_numel: int) -> int:
    numel = sum(stop - start for start, stop in pieces)
    return min(len(pieces), -(-numel // block_numel))


def _group(pieces: Sequence[Piece], count: int) -> list[tuple[Piece, ...]]:
    """Put consecutive pieces into `count` groups of about the same number of elements."""
    numel = sum(stop - start for start, stop in pieces)
    groups: list[list[Piece]] = [[] for _ in range(count)]
    before = 0
    for start, stop in pieces:
        middle = before + (stop - start) // 2
        groups[middle * count // numel].append((start, stop))
        before += stop - start
    return [tuple(group) for group in groups]
