"""Nested values with tensors as one file, without pickle: a JSON description, then the bytes of all tensors.

    penstock-state/1 LENGTH OF THE DESCRIPTION
    {"dict": [["model", {"dict": [["weight", {"tensor": ["float32", [3, 2], [0, 1], 0]}], ...]}], ...]}
    bytes of the tensors, each at the place (after the description) that stands last

A tensor has its type, its shape, and the order of its dimensions in memory. Tensors lie in the order of the
description, none over another: together they are never larger than the file. Values may be numbers, strings, None,
bytes, torch's types and devices, and lists, tuples and dicts of these.
"""

import hashlib
import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain
from mmap import mmap
from pathlib import Path
from typing import Any

import torch

from penstock.errors import FormatError, TrainError, one_line, shorten
from penstock.fields import load_json, with_an_end
from penstock.torch.saved_folder import damaged

_FORMAT = b"penstock-state/1"
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_ALIGNED = 64  # bytes; tensors begin at multiples
_LONGEST_HEAD = 64  # bytes of the first line
_INTEGER_BITS = 129  # of whole numbers: numpy's PCG64 has a state of 128, without a sign
_MOST_DIMENSIONS = 64  # as torch's own operations take them


def write_state(path: Path, values: Mapping[str, Any]) -> str:
    """Write values to a file, wait until the disk has them, and return the SHA-256 of the file."""
    digest, pieces = hashlib.sha256(), _file_pieces(values)  # what cannot be kept is refused before a file is made
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def state_bytes(values: Mapping[str, Any]) -> bytes:
    """Return values as a file has them, for `parse_state`."""
    return b"".join(_file_pieces(values))


def _file_pieces(values: Mapping[str, Any]) -> Iterator[Any]:
    writer = _Writer()
    text = json.dumps(writer.value(dict(values))).encode()
    text += b" " * (-(len(_head(len(text))) + len(text)) % _ALIGNED)  # tensors begin at multiples in the file, too
    return chain((_head(len(text)), text), _pieces(writer.tensors))


def _head(length: int) -> bytes:
    return b"%s %012d\n" % (_FORMAT, length)


def read_state(path: Path, device: torch.device, sha256: str) -> dict[str, Any]:
    """Return the values of a file, tensors on `device`; raise `FormatError` unless the file has that SHA-256."""
    try:
        data = bytearray(with_an_end(path).read_bytes())
    except OSError as error:
        raise FormatError(str(path), "file", error.strerror, "a file of a checkpoint") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise damaged(path)
    return parse_state(data, str(path), device)


def parse_state(data: bytearray | mmap, where: str, device: torch.device, shares: bool = False) -> dict[str, Any]:
    """Return the values of a file's bytes; raise `FormatError` for what no writer wrote.

    `shares`: tensors lie in `data` itself, which must be writable and stays as long as they do.
    """
    try:
        return _parse(data, device, shares)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, RuntimeError) as error:
        raise FormatError(where, "file", one_line(error), "a file of a checkpoint") from error


def _parse(data: bytearray | mmap, device: torch.device, shares: bool) -> dict[str, Any]:
    end = data[:_LONGEST_HEAD].index(b"\n") + 1
    name, length = data[:end].split()
    start = end + int(length)
    if name != _FORMAT or start > len(data):
        raise ValueError(f"a file of {len(data)} bytes that begins with {bytes(name)!r}")
    values = _Reader(data, start, device, shares).value(load_json(data[end:start].decode(), _INTEGER_BITS))
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__} at the top")
    return values


class _Writer:
    """Describes values and collects their tensors in the order in which they are written."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._place = 0

    def value(self, value: Any) -> Any:
        """Return a value as JSON has it."""
        if isinstance(value, int | str):
            return self._checked(value)
        if value is None or isinstance(value, float):
            return value
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value)}
        if isinstance(value, list):
            return [self.value(each) for each in value]
        if isinstance(value, tuple):
            return {"tuple": [self.value(each) for each in value]}
        if isinstance(value, dict):
            pairs = [[self.value(key), self.value(each)] for key, each in value.items()]
            versions = getattr(value, "_metadata", None)  # of modules, which torch hangs on a state_dict
            return {"dict": pairs} if versions is None else {"dict": pairs, "versions": self.value(dict(versions))}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        raise TrainError(
            f"a checkpoint cannot hold a {type(value).__name__}; wanted tensors, numbers, strings, lists, tuples, dicts"
        )

    def _checked(self, value: int | str) -> int | str:
        if isinstance(value, int) and value.bit_length() >= _INTEGER_BITS:
            raise TrainError(
                f"a checkpoint cannot hold a whole number of {value.bit_length()} bits; wanted 128 at most"
            )
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise TrainError(
                f"a checkpoint cannot hold a string with half of a surrogate pair, {shorten(ascii(value))}; wanted text"
            )
        return value

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TrainError(f"a checkpoint cannot hold a tensor of layout {tensor.layout}; wanted a dense one")
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda dimension: -strides[dimension])
        if not tensor.permute(order).is_contiguous():
            order = list(range(tensor.ndim))
        self.tensors.append(tensor.detach().permute(order))
        place, self._place = self._place, _behind(self._place, _nbytes(tensor))
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), order, place]


def _pieces(tensors: list[torch.Tensor]) -> Iterator[Any]:
    """Yield the bytes of each tensor, one at a time, and what fills up to the next one's place."""
    for tensor in tensors:
        yield memoryview(_bytes_of(tensor))
        yield bytes(-_nbytes(tensor) % _ALIGNED)


def _behind(place: int, nbytes: int) -> int:
    """Return the place of the tensor after one of `nbytes`."""
    return place + nbytes + -nbytes % _ALIGNED


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor in logical order, as a numpy array."""
    plain: torch.Tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy()


class _Reader:
    """Makes values from JSON that describes them and a file's data, which holds the tensors."""

    def __init__(self, data: bytearray | mmap, start: int, device: torch.device, shares: bool) -> None:
        self._data, self._start, self._device, self._shares = data, start, device, shares
        self._place = 0  # of the next tensor

    def value(self, found: Any) -> Any:
        """Return the value that JSON describes; anything else raises `ValueError`, `TypeError` or `KeyError`."""
        if isinstance(found, list):
            return [self.value(each) for each in found]
        if not isinstance(found, dict):
            return found
        if "versions" in found:
            state = OrderedDict(self._pairs(found["dict"]))
            state._metadata = self.value(found["versions"])  # type: ignore[attr-defined]
            return state
        ((kind, inside),) = found.items()
        match kind:
            case "tensor":
                return self._tensor(inside)
            case "dict":
                return dict(self._pairs(inside))
            case "tuple":
                return tuple(self.value(each) for each in inside)
            case "dtype":
                return _DTYPES[inside]
            case "device":
                return torch.device(inside)
            case "bytes":
                return bytes.fromhex(inside)
        raise ValueError(f"a value of the kind {kind!r}")

    def _pairs(self, inside: Any) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(each)) for key, each in inside]

    def _tensor(self, inside: Any) -> torch.Tensor:
        dtype, shape, order, place = _DTYPES[inside[0]], inside[1], inside[2], inside[3]
        if len(shape) > _MOST_DIMENSIONS or sorted(order) != list(range(len(shape))):
            raise ValueError(f"a tensor of {len(shape)} dimensions in the order {shorten(order)}")
        if any(size < 0 for size in shape) or place != self._place:
            raise ValueError(f"a tensor of shape {shorten(shape)} at {place}; its place is {self._place}")
        numel, start = math.prod(shape), self._start + place
        self._place = _behind(place, numel * dtype.itemsize)
        if start + numel * dtype.itemsize > len(self._data):
            raise ValueError(f"a tensor of shape {shorten(shape)} that ends behind the file")
        in_memory = [shape[dimension] for dimension in order]
        inverse = sorted(range(len(order)), key=lambda dimension: order[dimension])
        if numel == 0:
            return torch.empty(in_memory, dtype=dtype, device=self._device).permute(inverse)
        flat: torch.Tensor = torch.frombuffer(self._data, dtype=torch.uint8, count=numel * dtype.itemsize, offset=start)
        flat = flat if self._shares and not flat.data_ptr() % _ALIGNED else flat.clone()  # which is aligned
        return flat.view(dtype).reshape(in_memory).permute(inverse).to(self._device)
