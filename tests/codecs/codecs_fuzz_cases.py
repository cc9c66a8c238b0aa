"""The cases of both fuzzers of decoding: what an input of bytes does.

The first byte chooses the codec, the second what is done with the rest: taken as a whole payload, as a body under an
honest header, or as bits to flip in an honest payload. Every case runs between guard elements that must not change.
"""

import numpy as np

from penstock.codecs.header import Header, pack_header
from penstock.codecs.registry import codec_names, make_codec
from penstock.errors import CodecError

NUMEL = 97
CODECS = [make_codec(name) for name in codec_names()]


def honest(codec):
    out = np.zeros(codec.max_nbytes(NUMEL), np.uint8)
    gradient = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
    return out[: codec.encode(gradient, None, out)].tobytes()


PAYLOADS = [honest(codec) for codec in CODECS]


def payload_from(codec, whole, kind, data):
    """Return the bytes to decode."""
    if kind == 0:
        return data
    if kind == 1:
        most = codec.max_nbytes(NUMEL) - codec.header_nbytes
        body = data[1 : most + 1]
        header = Header(
            codec.program.name, tuple(codec.parameters.values()), NUMEL, len(body), data[0] & 7 if data else 0
        )
        return pack_header(header) + body
    flipped = bytearray(whole)
    for place, bit in zip(data[::2], data[1::2], strict=False):
        flipped[(place * 7 + codec.header_nbytes * (kind == 3)) % len(flipped)] ^= 1 << bit % 8
    return bytes(flipped)


def one_input(data):
    if len(data) < 2:
        return
    number, kind = data[0] % len(CODECS), data[1] % 4
    codec = CODECS[number]
    payload = np.frombuffer(payload_from(codec, PAYLOADS[number], kind, data[2:]), np.uint8)
    room = np.full(NUMEL + 32, 5.0, np.float32)
    try:
        if kind == 2:
            codec.decode_add(payload, room[16:-16], 0.5)
        else:
            codec.decode(payload, room[16:-16])
    except CodecError:
        pass
    assert (room[:16] == 5).all(), "wrote before the output"
    assert (room[-16:] == 5).all(), "wrote behind the output"
