"""Several tensors in one payload: small ones are encoded in one call and sent in one message.

The tensors are segments of one flat array, given by their boundaries, and each keeps its own scale. A payload is a
header with the flag `SEGMENTED` and the elements of all segments, then

    offset  bytes  field
    0       4      s, the number of segments
    4       8 s    of each segment: its elements, the bytes of its body; both uint32
    ...            the bodies, one behind the other: what `encode` writes behind its header

Eight bytes a tensor where payloads of their own would take a header each. On the CPU only: on a GPU encode them one by
one.
"""

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.codecs.elements import as_array, from_float32, room, to_float32
from penstock.codecs.feedback import Residual, memory_of
from penstock.codecs.header import NOT_FINITE, SEGMENTED, check_numel
from penstock.errors import CodecError, NonFiniteError

if TYPE_CHECKING:
    from penstock.codecs.dense.codec import Codec

Integers = NDArray[np.int64]


def table_nbytes(segments: int) -> int:
    """Return the bytes before the first body."""
    return 4 + 8 * segments


def max_nbytes_many(codec: "Codec", boundaries: Any) -> int:
    """Return the most bytes a payload of these segments can take."""
    edges = check_boundaries(boundaries)
    check_numel(int(edges[-1]))
    sizes = np.diff(edges).tolist()
    bodies = sum(map(codec.max_nbytes, sizes)) - len(sizes) * codec.header_nbytes
    return codec.header_nbytes + table_nbytes(len(sizes)) + bodies


def check_boundaries(boundaries: Any, numel: int | None = None) -> Integers:
    """Return boundaries as integers that ascend from 0, to `numel` where that is given.

    >>> check_boundaries([0, 3, 3, 7]).tolist()
    [0, 3, 3, 7]
    """
    found = np.ascontiguousarray(boundaries, np.int64)
    last = int(found[-1]) if found.size else 0
    if found.size == 0 or found[0] != 0 or (found[1:] < found[:-1]).any() or last != (last if numel is None else numel):
        end = "the number of elements" if numel is None else str(numel)
        raise CodecError(f"boundaries {found[:8].tolist()} ...; wanted integers that ascend from 0 to {end}")
    return found


def encode_many(
    codec: "Codec", gradient: Any, boundaries: Any, residual: Any, out: Any, tensors: Sequence[str] | None
) -> int:
    """Write one payload for all segments; see `Codec.encode_many`."""
    values = to_float32(as_array(gradient))
    edges = check_boundaries(boundaries, values.size)
    data = room(out, max_nbytes_many(codec, edges))
    kept = memory_of(residual.values() if isinstance(residual, Residual) else residual, values.size, "the gradient")
    segments = edges.size - 1
    calls = np.fromiter((number & 0xFFFFFFFF for number in islice(codec._calls, segments)), np.uint32, segments)
    table = data[codec.header_nbytes :][: table_nbytes(segments)]
    body = data[codec.header_nbytes + table.size :]
    failed, before = None, codec.copy_if_skipping(None, kept)
    try:
        sizes = codec.kernels.encode_many(values, edges, codec.arguments, codec.seed, calls, kept, body)
    except NonFiniteError as error:
        failed = int(error.args[0])
    if failed is not None:
        if kept is not None and before is not None:
            kept[:] = before
        name = tensors[failed] if tensors else f"tensor {failed} of {segments}"
        why = codec.refusal(values[edges[failed] : edges[failed + 1]], name)
        return codec.finish_skipped(out, values.size, why, SEGMENTED)
    written = np.empty(1 + 2 * segments, "<u4")
    written[0], written[1::2], written[2::2] = segments, np.diff(edges), sizes
    table[:] = written.view(np.uint8)
    return codec.finish(out, values.size, table.size + int(sizes.sum()), SEGMENTED)


def decode_many(codec: "Codec", payload: Any, boundaries: Any, out: Any, scale: float | None) -> None:
    """Write, or with a scale add, the values of all segments."""
    target = as_array(out)
    edges = check_boundaries(boundaries, target.size)
    header, data = codec.open(payload, target.size, segmented=True)
    values = target if target.dtype == np.float32 else to_float32(target)
    if header.flags & NOT_FINITE:
        values[:] = np.nan
    else:
        sizes = read_table(data, edges)
        codec.kernels.decode_many(data[table_nbytes(sizes.size) :], edges, sizes, values, codec.arguments, scale)
    if values is not target:
        from_float32(values, target)


def read_table(data: NDArray[np.uint8], edges: Integers) -> Integers:
    """Return the bytes of each body; raise `CodecError` unless the segments are those of the boundaries."""
    segments = edges.size - 1
    nbytes = table_nbytes(segments)
    found = np.frombuffer(data[: min(data.size, nbytes)].tobytes(), "<u4", min(data.size, nbytes) // 4)
    if data.size < nbytes or found[0] != segments or not np.array_equal(found[1::2], np.diff(edges)):
        count = int(found[0]) if found.size else 0
        raise CodecError(f"payload of {count} tensors; wanted {segments} of other sizes: boundaries differ")
    sizes = found[2::2].astype(np.int64)
    if int(sizes.sum()) != data.size - nbytes:
        raise CodecError(f"bodies of {int(sizes.sum())} bytes in a payload of {data.size - nbytes}: it is damaged")
    return sizes
