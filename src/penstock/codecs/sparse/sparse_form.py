"""Sparse blocks of a bucket on a device: selected there, and put in place there.

Where the host sends them, only the k chosen entries of each piece leave the device. A merge of two blocks is work for
microseconds and its result is needed on the host, where messages are; what falls out of it goes up to the residual.
Entries of all pieces of a block are moved, gathered and put in place together, by their index in the bucket.

Where blocks never leave the device (`queued_*`), kernels write, merge and read them (`triton/sparse_blocks.py`), with
indices as int32 whatever the codec's form of them is: gaps have a size that the host would have to know.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from penstock.codecs.graphs import Replays, Work
from penstock.codecs.header import NOT_FINITE
from penstock.codecs.payload_block import Block, Note, Piece, pinned, runs
from penstock.codecs.sparse.block import Entries, index_dtype
from penstock.codecs.sparse.sparse_codec import SparseCodec


@dataclass(frozen=True, slots=True)
class Kernels:
    """What launches kernels on one device, or what only notes them to have them compiled."""

    select: Any  # a `Selector`: the k largest magnitudes of a vector, or of many small ones at once
    blocks: Any  # `SparseBlocks`: kernels for blocks that stay on the device


@dataclass(frozen=True, slots=True)
class SparseForm:
    """The codec on one device, and whom to tell of values that are not finite."""

    codec: SparseCodec
    device: torch.device
    kernels: Kernels
    rehearsed: Kernels  # the same calls are noted in `rehearsal`
    rehearsal: Any  # a `Rehearsal`
    note: Note
    replays: Replays

    @property
    def queues(self) -> bool:
        """Yes: it is a `QueuedMergingForm` too."""
        return True

    def begin(self, count: int) -> int:
        """Return 0: the largest entries are no matter of chance."""
        return 0

    def encoder(self, bucket: torch.Tensor, residual: torch.Tensor | None, block: Block) -> "_Encoder":
        """Return what selects from the pieces of a block."""
        return _Encoder(self, bucket, residual, block)

    def decoder(self, block: Block, bucket: torch.Tensor, adds: bool, arrived: bool) -> "_Decoder":
        """Return what puts the entries of a block in place, or adds them there."""
        return _Decoder(self, block, bucket, adds)

    def merger(self, read: Block, write: Block, residual: torch.Tensor | None) -> "_Merger":
        """Return what adds a block to another, on the host."""
        return _Merger(self, read, write, residual)

    # Without the host

    def max_nbytes(self, numel: int) -> int:
        """Return the bytes of a block of `numel` elements."""
        return int(self.kernels.blocks.nbytes(numel, self.codec.entries(numel)))

    def compile(self) -> None:
        """Compile the kernels of all that was made to be queued, before the first of it is."""
        self.rehearsal.compile()

    def queued_encoder(
        self,
        bucket: torch.Tensor,
        residual: torch.Tensor | None,
        payloads: torch.Tensor,
        pieces: Sequence[Piece],
        places: Sequence[int],
        ordinals: Sequence[int],
    ) -> Callable[[int], None]:
        """Return what queues the selection from all pieces; a block of what is not finite says so."""
        selection, table = _Selection(self, bucket, residual, pieces), self._table(pieces)
        packed = table, payloads, self.kernels.blocks.places(places), selection.indices, selection.values
        selection.rehearse()
        self.rehearsed.blocks.pack(*packed)

        def start(seed: int) -> None:
            selection.queue()
            self.kernels.blocks.pack(*packed)

        return start

    def queued_merger(
        self,
        residual: torch.Tensor | None,
        payloads: torch.Tensor,
        pieces: Sequence[Piece],
        places: Sequence[int],
        others: Sequence[int],
    ) -> Work:
        """Return what queues the sum of two blocks of each piece; what falls out is added to the residual."""
        at, others_at = (self.kernels.blocks.places(each) for each in (places, others))
        merged = self._table(pieces), payloads, at, others_at, residual
        self.rehearsed.blocks.merge(*merged)
        return partial(self.kernels.blocks.merge, *merged)

    def queued_decoder(
        self,
        bucket: torch.Tensor,
        payloads: torch.Tensor,
        pieces: Sequence[Piece],
        places: Sequence[Sequence[int]],
        adds: bool,
    ) -> Work:
        """Return what queues the entries of all pieces from each source in turn; NaN for what was not finite."""
        table, spans, sources = self._table(pieces), runs(pieces), [self.kernels.blocks.places(each) for each in places]

        def put(kernels: Kernels) -> None:
            for number, at in enumerate(sources):
                kernels.blocks.put(table, payloads, at, bucket, adds or number > 0)

        def start() -> None:
            if not adds:
                for first, last in spans:
                    bucket[first:last] = 0.0
            put(self.kernels)

        put(self.rehearsed)
        return start

    def queued_look(self, bucket: torch.Tensor, pieces: Sequence[Piece]) -> "_Look":
        """Return what finds out, behind everything else, whether a piece became NaN."""
        return _Look(self, bucket, pieces)

    def replayed(self, work: Work) -> Work:
        """Return what queues kernels again and again, as one CUDA graph."""
        return self.replays.make(work)

    def _table(self, pieces: Sequence[Piece]) -> Any:
        return self.kernels.blocks.table(pieces, [self.codec.entries(stop - start) for start, stop in pieces])


class _Look:
    def __init__(self, form: SparseForm, bucket: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self._form, self._bucket = form, bucket
        self._firsts = torch.tensor([start for start, _ in pieces], dtype=torch.int64).to(bucket.device)
        self._found = torch.zeros(2, dtype=torch.int32, device=bucket.device)
        self._here = pinned(2, torch.int32, bucket.device)
        form.rehearsed.blocks.look(bucket, self._firsts, self._found)

    def start(self) -> None:
        """Queue the look and a copy of what it finds."""
        self._form.kernels.blocks.look(self._bucket, self._firsts, self._found)
        self._here.copy_(self._found, non_blocking=True)

    def finish(self) -> None:
        """Tell of gradients that are not finite."""
        if self._here[0]:
            self._form.note()


@dataclass(slots=True)
class Pairs:
    """Room for entries with their index in the bucket, here and on the device."""

    count: int
    device: torch.device
    indices: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)
    indices_here: torch.Tensor = field(init=False)
    values_here: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.indices = torch.zeros(self.count, dtype=torch.int64, device=self.device)
        self.values = torch.zeros(self.count, dtype=torch.float32, device=self.device)
        self.indices_here = pinned(self.count, torch.int64, self.device)
        self.values_here = pinned(self.count, torch.float32, self.device)

    def bring(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue a copy of the first entries up; return them."""
        indices, values = self.indices[:count], self.values[:count]
        indices.copy_(self.indices_here[:count], non_blocking=True)
        values.copy_(self.values_here[:count], non_blocking=True)
        return indices, values

    def put(self, at: int, indices: Any, values: Any, offset: int) -> int:
        """Write entries of a piece that begins at `offset` of the bucket; return where the next go."""
        np.add(indices, offset, out=self.indices_here.numpy()[at : at + indices.size], casting="unsafe")
        self.values_here.numpy()[at : at + indices.size] = values
        return at + int(indices.size)


class _Selection:
    """The largest entries of each piece of a bucket: taken out of the residual, which keeps the rest."""

    def __init__(
        self, form: SparseForm, bucket: torch.Tensor, residual: torch.Tensor | None, pieces: Sequence[Piece]
    ) -> None:
        self._form, self._bucket, self._residual = form, bucket, residual
        counts = [form.codec.entries(stop - start) for start, stop in pieces]
        self.ends = list(accumulate(counts, initial=0))
        self.indices = torch.zeros(self.ends[-1], dtype=torch.int64, device=bucket.device)  # in the bucket
        self.values = torch.zeros(self.ends[-1], dtype=torch.float32, device=bucket.device)  # not rounded
        self.runs, small, self._large = runs(pieces), [], []
        for (start, stop), low, high in zip(pieces, self.ends, self.ends[1:], strict=False):
            if form.kernels.select.is_small(stop - start, high - low):
                small.append((start, stop - start, high - low, low))
            else:
                self._large.append((start, stop, low, high))
        self._small = torch.tensor(small, dtype=torch.int32).view(-1, 4).t().contiguous().to(bucket.device)

    @property
    def _source(self) -> torch.Tensor:
        return self._bucket if self._residual is None else self._residual

    def queue(self) -> None:
        """Queue all of it."""
        source = self._source
        if self._residual is not None:
            for start, stop in self.runs:
                source[start:stop] += self._bucket[start:stop]
        self._form.replays.side_by_side([self._select_small, *(partial(self._select, *each) for each in self._large)])
        torch.index_select(source, 0, self.indices, out=self.values)
        if self._residual is not None:
            sent = self.values if self._form.codec.value_bits == 32 else self.values.bfloat16().float()
            source.index_add_(0, self.indices, sent, alpha=-1)

    def rehearse(self) -> None:
        """Have the kernels noted that choose entries."""
        select = self._form.rehearsed.select
        select.each(self._source, self._small, self.indices)
        for start, stop, low, high in self._large:
            select(self._source[start:stop], high - low)

    def _select_small(self) -> None:
        self._form.kernels.select.each(self._source, self._small, self.indices)

    def _select(self, start: int, stop: int, low: int, high: int) -> None:
        chosen = self._form.kernels.select(self._source[start:stop], high - low)
        torch.add(chosen, start, out=self.indices[low:high])


class _Encoder:
    def __init__(self, form: SparseForm, bucket: torch.Tensor, residual: torch.Tensor | None, block: Block) -> None:
        self._form, self._block = form, block
        self._selection = _Selection(form, bucket, residual, block.pieces)
        self._indices, self._values = (
            pinned(each.numel(), each.dtype, bucket.device)
            for each in (self._selection.indices, self._selection.values)
        )
        self.start = form.replays.make(self._queue)

    def _queue(self) -> None:
        """Queue the selection of each piece, and a copy of it down."""
        self._selection.queue()
        self._indices.copy_(self._selection.indices, non_blocking=True)
        self._values.copy_(self._selection.values, non_blocking=True)

    def finish(self) -> None:
        """Write the blocks."""
        codec, indices, values = self._form.codec, self._indices.numpy(), self._values.numpy()
        edges = pairwise(self._selection.ends)
        for ((start, stop), payload, _), (low, high) in zip(self._block.payloads(), edges, strict=True):
            if np.isfinite(values[low:high]).all():
                chosen = (indices[low:high] - start).astype(index_dtype(stop - start))
                codec.write(Entries(chosen, values[low:high]), payload, stop - start)
            else:
                self._form.note()
                codec.write_header(payload, stop - start, 0, NOT_FINITE)


class _Decoder:
    def __init__(self, form: SparseForm, block: Block, bucket: torch.Tensor, adds: bool) -> None:
        self._form, self._block, self._bucket, self._adds = form, block, bucket, adds
        self._pairs = Pairs(sum(form.codec.entries(stop - start) for start, stop in block.pieces), bucket.device)
        self._runs = runs(block.pieces)
        self._replay = form.replays.make(lambda: self._queue(self._pairs.count))

    def start(self) -> None:
        """Read the blocks here, and queue what puts their entries in place."""
        at, broken = 0, []
        for (start, stop), payload, _ in self._block.payloads():
            entries = self._form.codec.read(payload, stop - start)
            if entries is None:
                broken.append((start, stop))
            else:
                at = self._pairs.put(at, entries.indices, entries.values, start)
        if broken:
            self._form.note()
            self._queue(at)
        else:
            self._replay()
        for start, stop in broken:
            self._bucket[start:stop] = float("nan")

    def _queue(self, count: int) -> None:
        indices, values = self._pairs.bring(count)
        if self._adds:
            self._bucket.index_add_(0, indices, values)
        else:
            for start, stop in self._runs:
                self._bucket[start:stop] = 0.0
            self._bucket.index_copy_(0, indices, values)

    def finish(self) -> None:
        """Nothing."""


class _Merger:
    def __init__(self, form: SparseForm, read: Block, write: Block, residual: torch.Tensor | None) -> None:
        self._form, self._read, self._write, self._residual = form, read, write, residual
        most = 2 * sum(form.codec.entries(stop - start) for start, stop in write.pieces)
        self._dropped = Pairs(most if residual is not None else 0, form.device)
        self._at = 0

    def start(self) -> None:
        """Merge here; queue what adds the dropped entries to the residual."""
        self._at = 0
        for ((start, _), out, _), (_, arrived, _) in zip(self._write.payloads(), self._read.payloads(), strict=True):
            self._form.codec.merge(arrived, out, None if self._residual is None else self._keeping(start))
        if self._residual is not None and self._at:
            self._residual.index_add_(0, *self._dropped.bring(self._at))

    def _keeping(self, offset: int) -> Any:
        """Return what takes the dropped entries of a piece."""

        def keep(indices: Any, values: Any) -> None:
            self._at = self._dropped.put(self._at, indices, values, offset)

        return keep

    def finish(self) -> None:
        """Nothing."""
