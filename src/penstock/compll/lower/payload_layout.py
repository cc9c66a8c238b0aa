"""Bytes of the wire format: where fields stand, how vectors are packed, and what an encoded gradient can take at most.

Fields follow one another without gaps, so a 4-byte value may start at any byte; numbers are little-endian. Values of
less than a byte are packed from the low bit up (the first of four `uint2` is bits 0-1), the last byte filled up with 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.compll.ir import GRADIENT, Apply, Field, Filter, Layout, Length, Program
from penstock.compll.types import Scalar, Vector, packed_nbytes
from penstock.errors import CodecError

Bytes = NDArray[np.uint8]


def size_at(length: Length, counts: Mapping[str, int]) -> int:
    """Return a length in elements, given the sizes of the gradient and of the counted vectors."""
    return -(-counts[length.of] // length.group)


def field_nbytes(field: Field, counts: Mapping[str, int]) -> int:
    """Return the bytes one field takes."""
    if isinstance(field.type, Vector):
        assert field.length is not None
        return packed_nbytes(field.type.element, size_at(field.length, counts))
    return field.type.nbytes


def pack(values: NDArray[Any], element: Scalar) -> Bytes:
    """Return a vector as bytes.

    >>> from penstock.compll.types import SCALARS
    >>> pack(np.array([1, 2, 3, 0, 1], np.uint8), SCALARS["uint2"]).tolist()
    [57, 1]
    """
    if element.bits >= 8:
        return np.ascontiguousarray(values).astype(f"<{np.dtype(element.storage).str[1:]}", copy=False).view(np.uint8)
    padded = np.zeros(packed_nbytes(element, values.size) * element.per_byte, np.uint8)
    padded[: values.size] = values
    columns = padded.reshape(-1, element.per_byte)
    packed = np.zeros(columns.shape[0], np.uint8)
    for place in range(element.per_byte):
        packed |= columns[:, place] << np.uint8(place * element.bits)
    return packed


def unpack(data: Bytes, element: Scalar, size: int) -> NDArray[Any]:
    """Return the `size` values that `pack` put into `data`."""
    if element.bits >= 8:
        return np.frombuffer(data.tobytes(), np.dtype(element.storage).newbyteorder("<"), size)
    shifts = np.arange(element.per_byte, dtype=np.uint8) * np.uint8(element.bits)
    values = (data[:, None] >> shifts) & np.uint8(element.high)
    return values.reshape(-1)[:size]


@dataclass(frozen=True, slots=True)
class Placed:
    """A field found in a payload."""

    field: Field
    offset: int
    nbytes: int
    size: int  # elements of a vector, 1 for a scalar


def used_nbytes(layout: Layout, payload: Bytes, numel: int) -> int:
    """Return how many bytes of a padded payload its fields take; raise `CodecError` if it has not as many."""
    counts, offset = {GRADIENT: numel}, 0
    for field in layout.fields:
        if field.counts:
            found = int(scalar_at(payload, offset, field))
            counts[field.counts] = found if 0 <= found <= numel else 0  # `place_fields` says what is wrong with it
        offset += field_nbytes(field, counts)
    if offset > payload.size:
        raise CodecError(f"the payload has {payload.size} bytes; wanted {offset} for {numel} elements: it is damaged")
    return offset


def place_fields(layout: Layout, payload: Bytes, numel: int) -> tuple[Placed, ...]:
    """Return where each field stands; raise `CodecError` unless the payload has exactly the bytes they ask for."""
    counts, offset, placed = {GRADIENT: numel}, 0, []
    for field in layout.fields:
        if field.counts:
            found = scalar_at(payload, offset, field)
            if not 0 <= found <= numel:
                raise CodecError(f"{field.name} is {found}; wanted 0 to {numel}: the payload is damaged")
            counts[field.counts] = int(found)
        nbytes = field_nbytes(field, counts)
        size = size_at(field.length, counts) if field.length else 1
        placed.append(Placed(field, offset, nbytes, size))
        offset += nbytes
    if offset != payload.size:
        raise CodecError(f"the payload has {payload.size} bytes; wanted {offset} for {numel} elements: it is damaged")
    return tuple(placed)


def scalar_at(payload: Bytes, offset: int, field: Field) -> Any:
    """Return the scalar that starts at any byte of a payload; raise `CodecError` where it is cut off or not finite."""
    assert isinstance(field.type, Scalar)
    data = payload[offset : offset + field.type.nbytes]
    if data.size < field.type.nbytes:
        raise CodecError(f"the payload ends inside {field.name}; wanted {offset + field.type.nbytes} bytes or more")
    value = np.frombuffer(data.tobytes(), np.dtype(field.type.storage).newbyteorder("<"))[0]
    if field.type.is_float and not np.isfinite(value):
        raise CodecError(f"{field.name} is {value}; wanted a finite number: the payload is damaged")
    if not field.type.is_float and not field.type.low <= value <= field.type.high:
        raise CodecError(f"{field.name} is {value}; wanted at most {field.type.high}: the payload is damaged")
    return value


def max_nbytes(program: Program, numel: int, arguments: Mapping[str, Any]) -> int:
    """Return the most bytes that encoding `numel` elements can take."""
    counts = {GRADIENT: numel}
    for statement in program.encode.statements:
        if isinstance(statement, Filter):
            counts[statement.name] = size_at(statement.over, counts)
        elif isinstance(statement, Apply) and statement.length.of == statement.name:
            counts[statement.name] = max(0, min(numel, _most(statement, numel, arguments)))
    return sum(field_nbytes(field, counts) for field in program.layout.fields)


def _most(statement: Apply, numel: int, arguments: Mapping[str, Any]) -> int:
    if statement.bound is None:
        return numel
    from penstock.compll.backends.reference import evaluate_static

    return int(evaluate_static(statement.bound, numel, arguments))
