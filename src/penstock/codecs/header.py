"""The first bytes of every payload: which codec wrote it, with what parameters, for how many elements.

A receiver needs nothing else to decode, and refuses what it cannot trust. Little-endian, 48 to 176 bytes, a multiple
of 16 so that the body behind it keeps the alignment of the buffer:

    offset  bytes  field
    0       4      magic, "PNSK"
    4       1      version of this header, 1
    5       1      p, the number of parameters, 0 to 16
    6       2      flags: 1, the body is padded; 2, the gradient was not finite and there is no body
    8       8      elements of the gradient
    16      8      bytes of the body that follows
    24      16     name of the codec, ASCII, padded with zeros
    40      8 p    parameters in the order the codec declares them, each a float64 (exact for integers and float32)
    ...            zeros up to a multiple of 16, less 4
    end-4   4      CRC-32 of everything before it

The checksum guards the header, not the body: a flipped bit in the body changes values of this one tensor, as it would
in an uncompressed message, and can reach nothing else, because every size and index is checked against the header.
"""

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache

from penstock.errors import CodecError, shorten

MAGIC = b"PNSK"
VERSION = 1
FLAGS_OFFSET = 6  # of the byte that holds all flags
BODY_NBYTES = slice(16, 24)  # where the bytes of the body are written
MAX_PARAMETERS = 16
MAX_NUMEL = 1 << 30  # what the compressor language counts with
_FIXED = struct.Struct("<4sBBHQQ16s")
_CHECKSUM = struct.Struct("<I")
_ALIGNMENT = 16

PADDED = 1  # the fields may end before the body does: a GPU counts them, and the host does not wait to learn
NOT_FINITE = 2  # nothing was encoded (`on_nonfinite="skip"`); decoding gives NaN, so that every rank skips the step

ON_NONFINITE = ("raise", "skip")  # what a codec may do about a gradient that holds NaN or infinity


@dataclass(frozen=True, slots=True)
class Header:
    """What a payload says about itself."""

    codec: str  # the algorithm's name
    parameters: tuple[float, ...]  # in the order the algorithm declares them
    numel: int  # elements of the gradient
    body_nbytes: int  # bytes after the header
    flags: int = 0  # PADDED, NOT_FINITE

    @property
    def nbytes(self) -> int:
        """Bytes of the header itself."""
        return header_nbytes(len(self.parameters))


def check_numel(numel: int) -> None:
    """Refuse a gradient whose payload no receiver would take, before it is encoded."""
    if numel > MAX_NUMEL:
        raise CodecError(f"a gradient of {numel} elements; a payload holds at most {MAX_NUMEL}: split the tensor")


def header_nbytes(parameters: int) -> int:
    """Return the bytes of a header with that many parameters.

    >>> [header_nbytes(count) for count in (0, 1, 2, 16)]
    [48, 64, 64, 176]
    """
    used = _FIXED.size + 8 * parameters + _CHECKSUM.size
    return -(-used // _ALIGNMENT) * _ALIGNMENT


@lru_cache(maxsize=4096)
def pack_header(header: Header) -> bytes:
    """Return the header as bytes; remembered, since training sends the same few again and again."""
    name = header.codec.encode("ascii")
    assert len(name) <= 16, f"{header.codec!r} is longer than the header's 16 bytes"
    assert len(header.parameters) <= MAX_PARAMETERS, f"{header.codec}: more than {MAX_PARAMETERS} parameters"
    count = len(header.parameters)
    fixed = _FIXED.pack(MAGIC, VERSION, count, header.flags, header.numel, header.body_nbytes, name)
    start = (fixed + struct.pack(f"<{count}d", *header.parameters)).ljust(header.nbytes - _CHECKSUM.size, b"\0")
    return start + _CHECKSUM.pack(zlib.crc32(start))


def parse_header(payload: bytes | memoryview, max_numel: int = MAX_NUMEL) -> Header:
    """Return the header that a payload begins with, or raise `CodecError`; looks at no byte behind it.

    `max_numel` is the most elements that the codec can have encoded.
    """
    if len(payload) < _FIXED.size:
        raise CodecError(f"payload of {len(payload)} bytes; wanted at least {_FIXED.size}: it was cut short")
    return _parse(bytes(payload[: header_nbytes(min(payload[5], MAX_PARAMETERS))]), max_numel, len(payload))


@lru_cache(maxsize=4096)
def _parse(payload: bytes, max_numel: int, received: int) -> Header:
    """Parse the bytes of a header; remembered, since training receives the same few again and again."""
    magic, version, count, flags, numel, body_nbytes, name = _FIXED.unpack_from(payload)
    if magic != MAGIC:
        raise CodecError(f"payload begins with {magic!r}; wanted {MAGIC!r}: these bytes are not from a penstock codec")
    if version != VERSION:
        raise CodecError(f"payload has header version {version}; wanted {VERSION}: use the same penstock on all ranks")
    _check_rest(payload, count, flags, numel <= max_numel, numel, received)
    parameters = struct.unpack_from(f"<{count}d", payload, _FIXED.size)
    text = name.rstrip(b"\0").decode("ascii", "backslashreplace")  # errors show it
    return Header(text if text.isprintable() else repr(text), parameters, numel, body_nbytes, flags)


def _check_rest(payload: bytes, count: int, flags: int, possible: bool, numel: int, received: int) -> None:
    nbytes = header_nbytes(count)
    if count > MAX_PARAMETERS or len(payload) < nbytes:
        raise CodecError(f"header with {count} parameters in a payload of {received} bytes: it is damaged")
    end = nbytes - _CHECKSUM.size
    found, wanted = _CHECKSUM.unpack_from(payload, end)[0], zlib.crc32(payload[:end])
    if found != wanted:
        raise CodecError(f"header checksum {found:#010x}; wanted {wanted:#010x}: bytes changed on the way")
    padding = bytes(payload[_FIXED.size + 8 * count : end])
    if flags > PADDED | NOT_FINITE or padding.strip(b"\0") or not possible:
        found = f"{numel} elements, flags {flags:#x} and {shorten(padding)} where zeros belong"
        raise CodecError(f"header with {found}: no codec writes such; it is damaged")
