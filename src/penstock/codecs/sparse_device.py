"""Sparse blocks of a bucket on a device: selected there, merged on the host, and put in place there.

Only the k chosen entries of each piece leave the device. A merge of two blocks is work for microseconds and its result
is needed on the host, where messages are; what falls out of it goes up to the residual. Entries of all pieces of a
block are moved, gathered and put in place together, by their index in the bucket.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from penstock.codecs.block import Block, Note, pinned, runs
from penstock.codecs.header import NOT_FINITE
from penstock.codecs.sparse import SparseCodec
from penstock.codecs.sparse_block import Entries, index_dtype


@dataclass(frozen=True, slots=True)
class SparseForm:
    """The codec on one device, and whom to tell of values that are not finite."""

    codec: SparseCodec
    device: torch.device
    select: Any  # (values, k) -> ascending int32 indices of the k largest magnitudes, on the device
    note: Note

    def encoder(self, bucket: torch.Tensor, residual: torch.Tensor | None, block: Block) -> "_Encoder":
        """Return what selects from the pieces of a block."""
        return _Encoder(self, bucket, residual, block)

    def decoder(self, block: Block, bucket: torch.Tensor, adds: bool, arrived: bool) -> "_Decoder":
        """Return what puts the entries of a block in place, or adds them there."""
        return _Decoder(self, block, bucket, adds)

    def merger(self, read: Block, write: Block, residual: torch.Tensor | None) -> "_Merger":
        """Return what adds a block to another, on the host."""
        return _Merger(self, read, write, residual)


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

    def fetch(self) -> None:
        """Queue a copy down."""
        self.indices_here.copy_(self.indices, non_blocking=True)
        self.values_here.copy_(self.values, non_blocking=True)

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


class _Encoder:
    def __init__(self, form: SparseForm, bucket: torch.Tensor, residual: torch.Tensor | None, block: Block) -> None:
        self._form, self._bucket, self._residual, self._block = form, bucket, residual, block
        counts = [form.codec.entries(stop - start) for start, stop in block.pieces]
        self._counts, self._edges = counts, list(pairwise(accumulate(counts, initial=0)))
        self._pairs = Pairs(sum(counts), bucket.device)
        offsets = torch.tensor([start for start, _ in block.pieces], dtype=torch.int64)
        self._offsets = offsets.repeat_interleave(torch.tensor(counts)).to(bucket.device)
        self._runs = runs(block.pieces)

    def start(self) -> None:
        """Queue the selection of each piece; the residual keeps the rest."""
        source, pairs = self._bucket, self._pairs
        if self._residual is not None:
            source = self._residual
            for start, stop in self._runs:
                source[start:stop] += self._bucket[start:stop]
        for (start, stop), count, (low, high) in zip(self._block.pieces, self._counts, self._edges, strict=True):
            pairs.indices[low:high] = self._form.select(source[start:stop], count)
        pairs.indices += self._offsets
        torch.index_select(source, 0, pairs.indices, out=pairs.values)
        if self._residual is not None:
            sent = pairs.values if self._form.codec.value_bits == 32 else pairs.values.bfloat16().float()
            source.index_add_(0, pairs.indices, sent, alpha=-1)
        pairs.fetch()

    def finish(self) -> None:
        """Write the blocks."""
        codec, indices, values = self._form.codec, self._pairs.indices_here.numpy(), self._pairs.values_here.numpy()
        for ((start, stop), payload, _), (low, high) in zip(self._block.payloads(), self._edges, strict=True):
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

    def start(self) -> None:
        """Read the blocks here, and queue what puts their entries in place."""
        at, broken = 0, []
        for (start, stop), payload, _ in self._block.payloads():
            entries = self._form.codec.read(payload, stop - start)
            if entries is None:
                broken.append((start, stop))
            else:
                at = self._pairs.put(at, entries.indices, entries.values, start)
        indices, values = self._pairs.bring(at)
        if self._adds:
            self._bucket.index_add_(0, indices, values)
        else:
            for start, stop in self._runs:
                self._bucket[start:stop] = 0.0
            self._bucket.index_copy_(0, indices, values)
        for start, stop in broken:
            self._form.note()
            self._bucket[start:stop] = float("nan")

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
