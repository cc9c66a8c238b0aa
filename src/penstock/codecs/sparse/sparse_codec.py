"""Sparse blocks: exactly k = max(1, round(density n)) entries of largest magnitude, sent, merged and kept (gTop-k).

All n where k of them with their indices would take more bytes than n without (`block.py`).

    codec = SparseCodec(density=0.001)
    codec.encode(gradient, residual, block)     # residual += gradient; the k largest leave it for the block
    codec.merge(other, block, residual)         # block += other; keeps k, what falls out goes to the residual
    codec.decode(block, gradient)               # zeros, and the k values in their places

Nothing is lost: after `encode`, gradient + residual before = decoded + residual after; after `merge`, the two blocks
before = the block after + what was added to the residual. Both hold element by element, to the rounding of one float32
addition. The published algorithm drops in a merge what no later step can put back (erratum 4): `published.py`.

Among equal magnitudes the lowest index wins, in `encode` and in `merge`, and a + b is b + a to the bit: two ranks that
merge the same two blocks end with the same bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.codecs.codec import NOTE, Bound, Bytes, Capabilities, HeaderCodec, not_finite
from penstock.codecs.elements import Floats, as_array, from_float32, room, to_float32
from penstock.codecs.feedback import Residual, memory_of
from penstock.codecs.header import NOT_FINITE, ON_NONFINITE, Header, header_nbytes, pack_header, parse_header
from penstock.codecs.sparse.block import (
    INDEX_FORMS,
    VALUE_BITS,
    BlockForm,
    Entries,
    Indices,
    Rooms,
    entry_count,
    index_dtype,
)
from penstock.codecs.sparse.entry_kernels import add_at, cut, gather, put_at, subtract_at, unite
from penstock.codecs.sparse.fused_encode import bound_encode
from penstock.codecs.spec import number_text
from penstock.compll.select import select_largest
from penstock.errors import CodecError, NonFiniteError

NAME = "sparse"
Keep = Callable[[Indices, Floats], None]  # takes entries that are not sent
MAX_NUMEL = 1 << 48  # more than any memory holds; a header that says more is damaged
_PARAMETERS = 3


@dataclass(frozen=True)
class SparseCodec(HeaderCodec):
    """Top-k selection, with `merge`."""

    density: float  # share of the elements that is sent
    value_bits: int = 32  # 32: float32; 16: bfloat16, whose rounding stays in the residual
    index_form: str = "smaller"  # "int32", "gaps" (base 128), or whichever is smaller for the tensor
    on_nonfinite: str = "raise"  # what a gradient with NaN or infinity does: raise, skip the step (AMP), or note
    defers_nonfinite_check: bool = False  # on a GPU it may be noted one call later
    _rooms: Rooms = field(default_factory=Rooms, repr=False, compare=False)
    _forms: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # on each device, for programs

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise CodecError(f"density {self.density}; wanted more than 0 and at most 1")
        policies = (*ON_NONFINITE, NOTE)
        for name, known in (("value_bits", VALUE_BITS), ("index_form", INDEX_FORMS), ("on_nonfinite", policies)):
            if getattr(self, name) not in known:
                wanted = ", ".join(str(one) for one in known)
                raise CodecError(f"{name} is {getattr(self, name)!r}; wanted one of {wanted}")

    @property
    def name(self) -> str:
        """The codec and its settings; equal names read one another's blocks."""
        density = number_text(self.density)
        return f"{NAME}(density={density}, value_bits={self.value_bits}, index_form={self.index_form})"

    @property
    def fingerprint(self) -> str:
        """Empty: the name says everything."""
        return ""

    @cached_property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Of deferred feedback nothing is put off, but gradients are scaled as they are read."""
        return Capabilities(
            deferred_feedback=True,
            merging=True,
            half_precision=True,
            device_form=self.on_nonfinite != "skip" and find_spec("triton") is not None,
            defers_nonfinite_check=self.defers_nonfinite_check,
        )

    @property
    def header_nbytes(self) -> int:
        """Bytes of the header before every body."""
        return header_nbytes(_PARAMETERS)

    def entries(self, numel: int) -> int:
        """Return k: how many entries a block of `numel` elements has; all, where that takes fewer bytes."""
        return self._form(numel).count

    def max_nbytes(self, numel: int) -> int:
        """Return the bytes that a block of `numel` elements needs at most."""
        return header_nbytes(_PARAMETERS) + self._form(numel).max_nbytes

    def encode(self, read: Any, residual: Any, out: Any, tensor: str = "the gradient") -> int:
        """Select from `read` plus `residual`; return the bytes written. The residual is left with what was not sent.

        `residual` is None, float32 memory of as many elements, or a `Residual` with such memory, whose factor `read`
        is multiplied by; `tensor` is what an error calls the gradient.
        """
        values = to_float32(as_array(read))
        block = room(out, self.max_nbytes(values.size))
        memory, factor = _with_factor(residual)
        kept = memory_of(memory, values.size, tensor)
        if self.on_nonfinite == "skip" and not np.isfinite(values).all():
            return self.refuse(values.size, block)  # and the residual is as it was
        if kept is not None:
            kept += values if factor == 1.0 else values * np.float32(factor)
        entries = self._select(values if kept is None else kept, tensor)
        if kept is not None:
            subtract_at(kept, entries.indices, self._form(values.size).rounded(entries.values))
        return self.write(entries, block, values.size)

    def bind_encode(self, values: Any, residual: Any, out: Any) -> Bound:
        """Return an encode of memory that stays, in one pass over it where feedback is deferred."""
        usual = super().bind_encode(values, residual, out)
        if not isinstance(residual, Residual) or self.on_nonfinite == "skip":
            return usual
        room(out, self.max_nbytes(values.size))
        body = out[header_nbytes(_PARAMETERS) :]
        write_body = bound_encode(self._form(values.size), values, residual.factor, residual.memory, body)
        return usual if write_body is None else partial(self._encode_bound, write_body, values.size, out)

    def _encode_bound(self, write_body: Callable[[], int], numel: int, block: Bytes) -> None:
        nbytes = write_body()
        if nbytes:
            self.write_header(block, numel, nbytes)
        else:
            self.note_nonfinite(not_finite())
            self.refuse(numel, block)

    def decode(self, read: Any, out: Any) -> None:
        """Write zeros, and the values of a block in their places."""
        target = as_array(out)
        entries = self.read(read, target.size)
        if entries is None:
            _fill_nan(target)
            return
        target.fill(0)
        _put(target, entries.indices, entries.values)

    def decode_add(self, read: Any, out: Any) -> None:
        """Add the values of a block in their places."""
        target = as_array(out)
        entries = self.read(read, target.size)
        if entries is None:
            _fill_nan(target)
        elif target.dtype == np.float32:
            add_at(target, entries.indices, entries.values)
        else:
            total = to_float32(target[entries.indices]) + entries.values
            _put(target, entries.indices, total)

    def merge(self, read: Any, write: Any, residual: Any) -> None:
        """Add a block to another, in place, and keep k entries; what falls out is added to `residual`.

        Without a residual (None) it is dropped: then another rank that merges the same blocks must keep it. A residual
        that is elsewhere is given as a function that takes indices and values.
        """
        block = as_array(write)
        numel = parse_header(block.data, MAX_NUMEL).numel
        room(block, self.max_nbytes(numel))
        keep = _keeping(residual, numel)
        one, other = self.read(block, numel), self.read(read, numel, "other")
        if one is None or other is None:  # the step will be skipped on all ranks; what was sent is still owed
            for entries in (one, other):
                if keep is not None and entries is not None:
                    keep(entries.indices, entries.values)
            self.refuse(numel, block)
            return
        form = self._form(numel)
        chosen = self._largest_of_sum(one, other, keep)
        if keep is not None and form.value_bits < 32:
            keep(chosen.indices, chosen.values - form.rounded(chosen.values))
        self.write(chosen, block, numel)

    def read(self, block: Any, numel: int, room: str = "one") -> Entries | None:
        """Return the entries of a block, or None of a step to be skipped; `CodecError` for a damaged one.

        The entries may share the block's memory, or lie in the codec's room of that name until it is used again. Bytes
        behind the block are ignored: buffers have the largest size.
        """
        data = as_array(block)
        header = parse_header(data.data, MAX_NUMEL)
        self._check(header, numel, data.size)
        if header.flags & NOT_FINITE:
            return None
        indices = self._rooms.get(room, self.entries(numel), index_dtype(numel))
        return self._form(numel).read(data[header.nbytes : header.nbytes + header.body_nbytes], indices)

    def write(self, entries: Entries, block: Bytes, numel: int) -> int:
        """Write a block of entries chosen from `numel` elements; return its bytes."""
        nbytes = self._form(numel).write(entries, block[header_nbytes(_PARAMETERS) :])
        return self.write_header(block, numel, nbytes)

    def refuse(self, numel: int, block: Bytes) -> int:
        """Write a block that says "not finite" instead of entries, and decodes to NaN; return its bytes."""
        return self.write_header(block, numel, 0, NOT_FINITE)

    def write_header(self, block: Bytes, numel: int, nbytes: int, flags: int = 0) -> int:
        """Say what the `nbytes` behind it are a block of; return the bytes of both."""
        header = Header(NAME, self._parameters, numel, nbytes, flags)
        block[: header.nbytes] = np.frombuffer(pack_header(header), np.uint8)
        return header.nbytes + nbytes

    def on_device(self, device: Any, note: Callable[[], None] | None = None) -> Any:
        """Return the codec's form on a device, None where it has none; `note` is told of values that are not finite."""
        if not self.capabilities.device_form:
            return None
        if note is None and device in self._forms:
            return self._forms[device]
        from penstock.codecs.graphs import Replays
        from penstock.codecs.sparse.sparse_form import Kernels, SparseForm
        from penstock.compll.backends.triton.select_kernels import Selector
        from penstock.compll.backends.triton.sparse_blocks import SparseBlocks
        from penstock.compll.backends.triton.starter import Rehearsal, Starter

        starter, rehearsal = Starter(), Rehearsal()
        kernels, rehearsed = (
            Kernels(Selector(device, each), SparseBlocks(device, self.value_bits, each))
            for each in (starter, rehearsal)
        )
        told = note or self.note_nonfinite
        form = SparseForm(self, device, kernels, rehearsed, rehearsal, told, Replays(device))
        return form if note is not None else self._forms.setdefault(device, form)

    # Inside

    def _select(self, values: Floats, tensor: str) -> Entries:
        entries = self._chosen(self.entries(values.size), index_dtype(values.size))
        select_largest(values, entries.indices)
        if not gather(values, entries.indices, entries.values):
            raise NonFiniteError(not_finite(tensor))
        return entries

    def _largest_of_sum(self, one: Entries, other: Entries, keep: Keep | None) -> Entries:
        """Return the largest entries of a sum, as many as each of the two has; the rest is handed to `keep`."""
        dtype, most = one.indices.dtype.type, one.indices.size + other.indices.size
        indices, values = self._rooms.get("sum", most, dtype), self._rooms.get("values", most, np.float32)
        total = int(unite(one.indices, one.values, other.indices, other.values, indices, values))
        count = one.indices.size
        chosen = self._chosen(count + 1, dtype)
        if total:
            work = self._rooms.get("work", total, np.int32)
            left = cut(indices[:total], values[:total], count, work, chosen.indices, chosen.values)
            if keep is not None:
                keep(indices[:left], values[:left])
        return Entries(chosen.indices[:count], chosen.values[:count])

    def _chosen(self, count: int, dtype: type[Any]) -> Entries:
        return Entries(self._rooms.get("chosen", count, dtype), self._rooms.get("chosen", count, np.float32))

    def _form(self, numel: int) -> BlockForm:
        return BlockForm.of(numel, entry_count(self.density, numel), self.value_bits, self.index_form)

    @property
    def _parameters(self) -> tuple[float, ...]:
        return (self.density, float(self.value_bits), float(INDEX_FORMS.index(self.index_form)))

    def _check(self, header: Header, numel: int, nbytes: int) -> None:
        if (header.codec, header.parameters) != (NAME, self._parameters):
            settings = ", ".join(map(number_text, header.parameters))
            raise CodecError(f"block of {header.codec}({settings}); wanted {self.name}: all ranks need the same codec")
        if header.numel != numel:
            raise CodecError(f"block of {header.numel} elements; wanted {numel}: it belongs to another tensor")
        if header.nbytes + header.body_nbytes > nbytes:
            raise CodecError(
                f"block of {nbytes} bytes; its header says {header.nbytes + header.body_nbytes}: cut short"
            )
        if header.flags & ~NOT_FINITE or (header.flags and header.body_nbytes):
            raise CodecError(f"sparse block with flags {header.flags:#x} and {header.body_nbytes} bytes: it is damaged")


def _with_factor(residual: Any) -> tuple[Any, float]:
    """Return a residual's memory, and what gradients are multiplied by before they are added to it."""
    return (residual.values(), residual.factor) if isinstance(residual, Residual) else (residual, 1.0)


def _keeping(residual: Any, numel: int) -> Keep | None:
    """Return what takes indices and values that fall out of a merge."""
    if callable(residual):
        return cast(Keep, residual)
    return residual if residual is None else partial(add_at, memory_of(residual, numel, "a merge"))


def _put(target: NDArray[Any], indices: Indices, values: Floats) -> None:
    """Write values in the element type of `target`; 16-bit types as their bits, which numba can copy."""
    stored = _as_stored(values, target)
    if target.dtype == np.float16:
        target, stored = target.view(np.uint16), stored.view(np.uint16)
    put_at(target, indices, stored)


def _as_stored(values: Floats, target: NDArray[Any]) -> NDArray[Any]:
    """Return values in the element type of `target`."""
    if target.dtype == np.float32:
        return values
    to_float32(target[:0])  # refuses element types that are no gradient's
    stored = np.empty(values.size, target.dtype)
    from_float32(values, stored)
    return stored


def _fill_nan(target: NDArray[Any]) -> None:
    target[:] = _as_stored(np.full(1, np.nan, np.float32), target)
