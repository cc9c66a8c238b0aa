"""Payloads that were changed on the way, decoded and merged between pages that must not be touched.

Case `number` of a seed is always the same: it chooses a codec, a size, an element type, a call and a kind of damage.
Payload, output, merged block and residual lie in memory whose pages before and behind cannot be read or written, each
against one of the two: a byte too far ends the process. What lies beside them on their own pages must not change.
"""

import ctypes
import mmap
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.codecs.codec import Codec, HeaderCodec, PythonCodec
from penstock.codecs.header import BODY_NBYTES, MAX_PARAMETERS, header_nbytes
from penstock.codecs.registry import codec_names, make_codec
from penstock.codecs.sparse.sparse_codec import SparseCodec
from penstock.errors import CodecError

Bytes = NDArray[np.uint8]
SIZES = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 128, 129, 500, 511, 513, 1025, 2048, 4099)
DTYPES = (np.float32, np.float32, np.float16, np.uint16)  # uint16: bfloat16; float32 is what most gradients are
VARIANTS = (  # beside the defaults of every algorithm that ships
    "3lc(sparsity=1.75)", "adacomp(bin=7)", "blocks(bits=2,block=7,stochastic=1)", "blocks(bits=8,block=64)",
    "dgc(density=0.5,samples=64)", "fp8(mantissa=2)", "graddrop(density=0.3)", "onebit(block=16)", "qsgd(bits=2)",
    "qsgd(bits=8)", "tbq(tau=0.5)", "terngrad(bitwidth=1)", "terngrad(bitwidth=8,block=32)", "topk(density=0.5)",
    "published(density=0.3)",
)  # fmt: skip
SPARSE = tuple(
    SparseCodec(density, value_bits, form)
    for density, value_bits, form in (
        (0.05, 32, "int32"), (0.5, 32, "gaps"), (1.0, 32, "smaller"), (0.001, 32, "smaller"), (0.3, 16, "int32"),
        (0.05, 16, "gaps"), (1.0, 16, "smaller"),
    )
)  # fmt: skip
_CANARY = 0xA5
_PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_WORDS = (0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x00000001)
_COUNTS = (0, 1, 255, 256, 1 << 30, (1 << 30) + 1, 1 << 31, 1 << 32, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


class Guarded:
    """Memory between two pages that cannot be touched."""

    def __init__(self, nbytes: int) -> None:
        pages = -(-nbytes // _PAGE)
        self._map = mmap.mmap(-1, (pages + 2) * _PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for page in (0, pages + 1):
            if _LIBC.mprotect(ctypes.c_void_p(address + page * _PAGE), ctypes.c_size_t(_PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.memory = np.frombuffer(self._map, np.uint8)[_PAGE : (pages + 1) * _PAGE]
        self._used: Bytes = self.memory
        self._free: Bytes = self.memory[:0]

    def take(self, nbytes: int, at_end: bool) -> Bytes:
        """Return so many bytes that end, or begin, where the process may not go on."""
        cut = self.memory.size - nbytes if at_end else nbytes
        self._used, self._free = (self.memory[cut:], self.memory[:cut]) if at_end else self._halves(cut)
        self._free[:] = _CANARY
        return self._used

    def _halves(self, cut: int) -> tuple[Bytes, Bytes]:
        return self.memory[:cut], self.memory[cut:]

    @property
    def is_intact(self) -> bool:
        """Whether what was not taken is as it was."""
        return bool((self._free == _CANARY).all())


class Plain(PythonCodec):
    """A codec as the documentation has one: float32 values as they are."""

    name = "plain"

    def max_body_nbytes(self, numel: int) -> int:
        """Return four bytes for each."""
        return 4 * numel

    def encode_body(self, values: Any, body: Any) -> int:
        """Copy."""
        body[:] = values.view(np.uint8)
        return int(body.size)

    def decode_body(self, body: Any, values: Any) -> None:
        """Copy back."""
        values[:] = body.view(np.float32)


@dataclass
class Target:
    """A codec and its honest payloads."""

    label: str
    codec: Any  # a HeaderCodec

    @cached_property
    def payloads(self) -> dict[int, tuple[bytes, bytes]]:
        """Two payloads of each size."""
        return {numel: (self._encoded(numel, 1), self._encoded(numel, 2)) for numel in SIZES}

    def _encoded(self, numel: int, seed: int) -> bytes:
        gradient = np.random.default_rng(seed).standard_normal(numel).astype(np.float32)
        gradient[: numel // 3 * (seed - 1)] = 0.0  # runs of zeros, which some codecs write otherwise
        out = np.zeros(self.codec.max_nbytes(numel), np.uint8)
        return out[: self.codec.encode(gradient, None, out)].tobytes()

    def use(self) -> None:
        """Call everything once on honest payloads, so that no case has to compile a kernel."""
        for numel, (payload, other) in self.payloads.items():
            read, write = (np.frombuffer(each, np.uint8).copy() for each in (payload, other))
            for dtype in DTYPES:
                for decode in _DECODES.values():
                    decode(self.codec, read, write, np.ones(numel, dtype))
            room = np.zeros(self.codec.max_nbytes(numel), np.uint8)
            room[: write.size] = write
            for merge in _MERGES.values() if self.merges else ():
                merge(self.codec, room.copy(), room, np.zeros(numel, np.float32))

    @property
    def merges(self) -> bool:
        """Whether blocks are added without decoding."""
        return bool(self.codec.capabilities.merging)


def targets() -> list[Target]:
    """Return every codec that ships, with some of its parameters; compiles kernels where the cache has none."""
    named = [Target(name, make_codec(name)) for name in (*codec_names(), *VARIANTS)]
    return [*named, *(Target(codec.name, codec) for codec in SPARSE), Target("a PythonCodec", Plain())]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case."""

    what: str  # the codec or the format
    damage: str
    result: str  # refused, loaded, or a finding
    is_finding: bool = False
    detail: str = ""


class PayloadCases:
    """All cases of one seed."""

    kind = "payloads"

    def __init__(self, seed: int, chosen: list[Target] | None = None) -> None:
        self._seed, self._targets = seed, targets() if chosen is None else chosen
        for target in self._targets:
            target.use()
        self._read, self._write = Guarded(1 << 16), Guarded(1 << 16)
        self._out, self._residual = Guarded(1 << 16), Guarded(1 << 16)

    def run(self, number: int) -> Outcome:
        """Do one case."""
        draw = Random(f"{self._seed} payload {number}")
        target = draw.choice(self._targets)
        numel = draw.choice(SIZES)
        whole = target.payloads[numel][draw.randrange(2)]
        damage = draw.choice(tuple(DAMAGES))
        damaged = DAMAGES[damage](_Honest(target, numel, whole, self._targets), draw)[: self._read.memory.size]
        if damage == "another tensor's":
            numel = draw.choice(SIZES)
        calls = (*_DECODES, *(_MERGES if target.merges else ()))
        call = draw.choice(calls)
        try:
            result = self._call(call, target.codec, whole, damaged, numel, draw)
        except CodecError as error:
            result = "refused"
            if "\n" in str(error) or len(str(error)) > 500:
                return Outcome(target.label, damage, "long message", True, f"{call}: {error!r}"[:300])
        except MemoryError:
            return Outcome(target.label, damage, "memory", True, call)
        except Exception as error:
            return Outcome(target.label, damage, f"uncaught {type(error).__name__}", True, f"{call}: {error!r}"[:300])
        if not (self._read.is_intact and self._write.is_intact and self._out.is_intact and self._residual.is_intact):
            return Outcome(target.label, damage, "wrote outside", True, call)
        head = target.codec.header_nbytes
        if result == "loaded" and damage not in RESEALED and damaged[:head] != whole[:head]:
            return Outcome(target.label, damage, "believed a damaged header", True, call)
        return Outcome(target.label, damage, result)

    def _call(self, call: str, codec: HeaderCodec, whole: bytes, damaged: bytes, numel: int, draw: Random) -> str:
        read = self._place(self._read, damaged, draw)
        dtype = draw.choice(DTYPES)
        out = self._out.take(numel * np.dtype(dtype).itemsize, draw.random() < 0.5).view(dtype)
        out[:] = 1
        residual = self._residual.take(4 * numel, draw.random() < 0.5).view(np.float32)
        residual[:] = 0
        write = self._place(self._write, whole, draw)
        if call in _MERGES:
            _MERGES[call](codec, read, self._roomy(codec, whole, draw), residual)
        else:
            _DECODES[call](codec, read, write, out)
        return "loaded"

    def _roomy(self, codec: Codec, whole: bytes, draw: Random) -> Bytes:
        """Return an honest block with room for the largest."""
        numel = int.from_bytes(whole[8:16], "little")
        block = self._write.take(max(codec.max_nbytes(numel), len(whole)), draw.random() < 0.5)
        block[: len(whole)] = np.frombuffer(whole, np.uint8)
        return block

    def _place(self, memory: Guarded, data: bytes, draw: Random) -> Bytes:
        placed = memory.take(len(data), draw.random() < 0.5)
        placed[:] = np.frombuffer(data, np.uint8)
        return placed


Decode = Callable[[Any, Bytes, Bytes, NDArray[Any]], Any]
_DECODES: Mapping[str, Decode] = {
    "decode": lambda codec, read, _, out: codec.decode(read, out),
    "decode_add": lambda codec, read, _, out: codec.decode_add(read, out),
    "bound decode": lambda codec, read, _, out: codec.bind_decode(read, out, False)(),
    "bound decode_add": lambda codec, read, _, out: codec.bind_decode(read, out, True)(),
    "decode_from": lambda codec, read, honest, out: _decode_from(codec, read, honest, out, False),
    "decode_from, adding": lambda codec, read, honest, out: _decode_from(codec, read, honest, out, True),
}


def _decode_from(codec: Any, read: Bytes, honest: Bytes, out: NDArray[Any], adds: bool) -> None:
    """Decode an honest payload first, whose header is then known, as in training."""
    decode = codec.bind_decode_from(out, adds)
    if int.from_bytes(honest[8:16].tobytes(), "little") == out.size:
        decode(honest)
    decode(read)


_MERGES: Mapping[str, Decode] = {
    "merge of it": lambda codec, read, write, residual: codec.merge(read, write, residual),
    "merge into it": lambda codec, read, write, residual: codec.merge(write, read, residual),
    "merge with itself": lambda codec, read, _, residual: codec.merge(read, read.copy(), None),
    "merge of it, kept elsewhere": lambda codec, read, write, _: codec.merge(read, write, lambda *entries: None),
}


@dataclass(frozen=True, slots=True)
class _Honest:
    target: Target
    numel: int
    payload: bytes
    others: list[Target]

    @property
    def head(self) -> int:
        """Bytes of the header."""
        return int(self.target.codec.header_nbytes)

    def another(self, draw: Random) -> bytes:
        """Return a payload of another gradient, size or codec."""
        target = self.target if draw.random() < 0.7 else draw.choice(self.others)
        return target.payloads[self.numel if draw.random() < 0.5 else draw.choice(SIZES)][draw.randrange(2)]


def _flip(data: bytes, start: int, draw: Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        if len(flipped) > start:
            flipped[draw.randrange(start, len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def _cut(honest: _Honest, draw: Random) -> bytes:
    return honest.payload[: draw.randrange(len(honest.payload))]


def _extend(honest: _Honest, draw: Random) -> bytes:
    more = draw.choice((b"\0", b"\xff", draw.randbytes(3), draw.randbytes(64), honest.payload))
    return honest.payload + more * draw.choice((1, 1, 7))


def _splice(honest: _Honest, draw: Random) -> bytes:
    other = honest.another(draw)
    if draw.random() < 0.3:  # one's header before the other's body
        return honest.payload[: honest.head] + other[honest.head :]
    return honest.payload[: draw.randrange(len(honest.payload))] + other[draw.randrange(len(other)) :]


def seal(payload: bytes) -> bytes:
    """Return a payload with a header checksum that is right, whatever else the header says."""
    if len(payload) < 48:
        return payload
    end = header_nbytes(min(payload[5], MAX_PARAMETERS)) - 4
    return payload[:end] + struct.pack("<I", zlib.crc32(payload[:end])) + payload[end + 4 :]


def _header(honest: _Honest, draw: Random) -> bytes:
    """Set fields of the header to extremes; its checksum agrees."""
    made = bytearray(honest.payload)
    for _ in range(draw.choice((1, 1, 2))):
        field = draw.choice(("version", "parameters", "flags", "numel", "body", "name", "value"))
        if field == "version":
            made[4] = draw.choice((0, 2, 255))
        elif field == "parameters":
            made[5] = draw.choice((0, 1, 2, 3, 15, 16, 17, 255))
        elif field == "flags":
            made[6:8] = draw.choice((1, 2, 3, 4, 0xFFFF)).to_bytes(2, "little")
        elif field == "name":
            made[24:40] = draw.choice((b"\0" * 16, b"\xff" * 16, b"sparse".ljust(16, b"\0"), draw.randbytes(16)))
        elif field == "value":
            made[40:48] = struct.pack("<d", draw.choice((0.0, -1.0, float("nan"), float("inf"), 1e308, 3.0, 2.0)))
        else:
            near = draw.choice((-1, 0, 1, 7)) + (honest.numel if field == "numel" else len(made) - honest.head)
            place = slice(8, 16) if field == "numel" else BODY_NBYTES
            made[place] = draw.choice((*_COUNTS, max(0, near), max(0, near))).to_bytes(8, "little")
    return seal(bytes(made))


def _words(honest: _Honest, draw: Random) -> bytes:
    """Set words of the body to extremes, most often at its beginning, where counts and scales are."""
    made = bytearray(honest.payload)
    body = len(made) - honest.head
    for _ in range(draw.choice((1, 1, 2, 5))):
        place = honest.head + min(draw.randrange(body + 1), draw.choice((0, 1, 2, 4, 8, body)))
        near = (honest.numel + draw.choice((-1, 0, 1))) & 0xFFFFFFFF
        word = struct.pack("<I", draw.choice((*_WORDS, near, near, near)))
        made[place : place + 4] = word[: len(made) - place]
    return bytes(made)


def _random_body(honest: _Honest, draw: Random) -> bytes:
    """Put random bytes, of a length that may occur, behind an honest header."""
    most = honest.target.codec.max_nbytes(honest.numel) - honest.head
    nbytes = draw.choice((len(honest.payload) - honest.head, most, draw.randint(0, most)))
    made = bytearray(honest.payload[: honest.head] + draw.randbytes(nbytes))
    made[BODY_NBYTES] = nbytes.to_bytes(8, "little")
    if draw.random() < 0.2:
        made[6] = draw.choice((1, 2, 3))
    return seal(bytes(made))


DAMAGES: Mapping[str, Callable[[_Honest, Random], bytes]] = {
    "bits": lambda honest, draw: _flip(honest.payload, 0, draw),
    "bits of the body": lambda honest, draw: _flip(honest.payload, honest.head, draw),
    "cut short": _cut,
    "extended": _extend,
    "spliced": _splice,
    "header fields": _header,
    "words of the body": _words,
    "random body": _random_body,
    "random bytes": lambda honest, draw: draw.randbytes(draw.choice((0, 1, 7, 47, 48, 64, 200, draw.randrange(5000)))),
    "another codec's": lambda honest, draw: honest.another(draw),
    "another tensor's": lambda honest, draw: honest.payload,
}
RESEALED = ("header fields", "random body", "spliced", "another codec's", "another tensor's")  # headers may be right
