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

A large bucket can also be carried out in waves, each a program of its own with one batch for each chunk: what is on its
way at a time, and the memory for it, is then that of a wave. Pieces and chunks are the same, and so is every bit.

    the same in two waves   wave 0: batches A0 | A1      wave 1: batches B0 | B1
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
        """The same without empty batches."""
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
    for tensor in pairwise(bounds):
        for chunk, pieces in enumerate(_pieces_by_chunk(tensor, chunks, partitions)):
            by_chunk[chunk] += pieces
    per_chunk = max((_batch_count(pieces, block_numel) for pieces in by_chunk), default=0)
    grouped = [_group(pieces, per_chunk) for pieces in by_chunk]
    if waves:
        return Batches(bounds[-1], tuple(grouped[chunk][turn] for turn in range(per_chunk) for chunk in range(chunks)))
    return Batches(bounds[-1], tuple(pieces for groups in grouped for pieces in groups))


def make_waves(bounds: Sequence[int], chunks: int, partitions: int | None, most_numel: int) -> list[Batches]:
    """Cut the tensors into the pieces of `make_batches` and sort them into waves: one batch for each chunk, some empty.

    A wave has at most `most_numel` elements, or as many as a tensor's pieces of one turn: one for each chunk. There are
    as few waves as that allows with the tensors in order, and the largest is as small as their number allows.

    >>> [wave.pieces for wave in make_waves([0, 4096, 5096, 9192], 2, None, 6000)]
    [(((0, 2048), (4096, 5096)), ((2048, 4096),)), (((5096, 7144),), ((7144, 9192),))]
    """
    _check_bounds(bounds)
    rows = [row for tensor in pairwise(bounds) for row in _rows(_pieces_by_chunk(tensor, chunks, partitions))]
    waves = []
    for group in _groups([sum(stop - start for _, (start, stop) in row) for row in rows], most_numel):
        batches: list[list[Piece]] = [[] for _ in range(chunks)]
        for chunk, piece in (each for index in group for each in rows[index]):
            batches[chunk].append(piece)
        waves.append(Batches(bounds[-1], tuple(map(tuple, batches))))
    return waves


def consecutive_waves(bounds: Sequence[int], most_numel: int) -> list[Sequence[int]]:
    """Put whole tensors that follow one another into waves of at most `most_numel` elements; a larger one is alone.

    Return the bounds of each wave's tensors. For strategies that also move dense data, which they do as a whole.

    >>> consecutive_waves([0, 3, 3, 10, 12], 10)
    [[0, 3, 3], [3, 10, 12]]
    """
    _check_bounds(bounds)
    groups = _groups([stop - start for start, stop in pairwise(bounds)], most_numel)
    return [bounds[group[0] : group[-1] + 2] for group in groups]


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


def _pieces_by_chunk(tensor: Piece, chunks: int, partitions: int | None) -> list[list[Piece]]:
    """Return the pieces of a tensor that belong to each chunk, in order."""
    start, stop = tensor
    found: list[list[Piece]] = [[] for _ in range(chunks)]
    count = piece_count(stop - start, chunks, partitions)
    for index, (low, high) in enumerate(cut(stop - start, count)):
        if low < high:
            found[index * chunks // count].append((start + low, start + high))
    return found


def _rows(by_chunk: Sequence[Sequence[Piece]]) -> list[list[tuple[int, Piece]]]:
    """Return the first piece of each chunk with the chunk's number, then the second ones, ..."""
    turns = range(max(map(len, by_chunk)))
    return [[(chunk, own[turn]) for chunk, own in enumerate(by_chunk) if turn < len(own)] for turn in turns]


def _groups(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return the fewest groups of consecutive indices whose sizes add up to at most `most`, or to the largest size.

    Of these, those whose largest sum is the smallest.
    """
    least = max(sizes, default=0)
    most = max(most, least)
    count = len(_filled_up(sizes, most))
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if len(_filled_up(sizes, middle)) == count else (middle + 1, most)
    return _filled_up(sizes, most)


def _filled_up(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return groups of consecutive indices, a new one where sizes would add up to more than `most`."""
    groups: list[list[int]] = []
    left = -1
    for index, size in enumerate(sizes):
        if size > left:
            groups.append([])
            left = most
        groups[-1].append(index)
        left -= size
    return groups


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
