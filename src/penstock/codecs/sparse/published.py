"""gTop-k's residual rule as published (Algorithm 4, line 10), to be compared with: it loses gradient (erratum 4).

A rank puts a value of its own back only if its index is missing from the final result. A value dropped inside one
subtree whose index comes through another is neither applied nor kept:

    k = 1, 4 ranks: rank 0 sends 1 at index 0, rank 1 sends 2 at index 1, ranks 2 and 3 send 3 at index 0
    [01] = {1: 2}, rank 0's 1 is dropped;  [23] = {0: 6};  the result {0: 6} has index 0, so no rank puts the 1 back

Merges here keep nothing; each rank remembers its own block from `encode` to `decode` and compares then. It is never
the default: `SparseCodec` is.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from penstock.codecs.codec import Capabilities, HeaderCodec
from penstock.codecs.sparse.block import Entries
from penstock.codecs.sparse.entry_kernels import add_at
from penstock.codecs.sparse.sparse_codec import SparseCodec


@dataclass
class PublishedCodec(HeaderCodec):
    """A sparse codec that puts back as published; one per rank, and blocks are decoded in the order of encoding."""

    codec: SparseCodec
    _sent: deque[tuple[Entries | None, Any]] = field(default_factory=deque, repr=False)  # own entries, and residual

    capabilities: ClassVar[Capabilities] = Capabilities(merging=True, half_precision=True)

    def __post_init__(self) -> None:
        self.on_nonfinite = self.codec.on_nonfinite

    @property
    def name(self) -> str:
        """The codec and its settings."""
        return f"published {self.codec.name}"

    @property
    def fingerprint(self) -> str:
        """Empty: the name says everything."""
        return ""

    @property
    def header_nbytes(self) -> int:
        """Bytes of the header before every body."""
        return self.codec.header_nbytes

    def for_bucket(self, number: int) -> Self:
        """Return the codec with a memory of its own for what it sends."""
        found = super().for_bucket(number)
        found._sent = deque()
        return found

    def max_nbytes(self, numel: int) -> int:
        """Return the bytes that a block of `numel` elements needs at most."""
        return self.codec.max_nbytes(numel)

    def encode(self, read: Any, residual: Any, out: Any) -> int:
        """Select and write as the codec does, and remember what was sent."""
        nbytes = self.codec.encode(read, residual, out)
        own = self.codec.read(out, read.size)
        self._sent.append((own and Entries(own.indices.copy(), own.values.copy()), residual))
        return nbytes

    def refuse(self, numel: int, out: Any) -> int:
        """Write a block that says "not finite"; there is nothing to put back for it."""
        self._sent.append((None, None))
        return self.codec.refuse(numel, out)

    def merge(self, read: Any, write: Any, residual: Any) -> None:
        """Add a block to another; what falls out is dropped."""
        self.codec.merge(read, write, None)

    def decode(self, read: Any, out: Any) -> None:
        """Write the values of the final block, and put back what this rank sent and the block has not."""
        self.codec.decode(read, out)
        if not self._sent:  # a block by itself, as where decoding is timed
            return
        own, residual = self._sent.popleft()
        final = self.codec.read(read, out.size)
        if own is None or residual is None:
            return
        missing = np.ones(own.indices.size, bool) if final is None else ~np.isin(own.indices, final.indices)
        add_at(residual, own.indices[missing], own.values[missing])

    def decode_add(self, read: Any, out: Any) -> None:
        """Add the values of a block; an all-gather has no final block to compare with."""
        self.codec.decode_add(read, out)
