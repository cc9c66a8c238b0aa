"""Codecs as a user writes them in Python; importable, so that processes of a test can have them."""

import numpy as np

from penstock.codecs.codec import Capabilities, PythonCodec


class Int8(PythonCodec):
    """The nearest of 255 multiples of the largest magnitude."""

    name = "int8"

    def max_body_nbytes(self, numel: int) -> int:
        return 4 + numel

    def encode_body(self, values: np.ndarray, body: np.ndarray) -> int:
        step = np.float32(np.abs(values).max(initial=0.0) / 127 or 1.0)
        body[:4] = np.frombuffer(step.tobytes(), np.uint8)
        body[4:] = np.rint(values / step).astype(np.int8).view(np.uint8)
        return body.size

    def decode_body(self, body: np.ndarray, values: np.ndarray) -> None:
        values[:] = body[4:].view(np.int8) * np.frombuffer(body[:4].tobytes(), np.float32)


class Nonzero(PythonCodec):
    """Values that are not zero, with their places: payloads vary in size."""

    name = "nonzero"
    capabilities = Capabilities(half_precision=True, variable_size=True)

    def max_body_nbytes(self, numel: int) -> int:
        return 8 * numel

    def encode_body(self, values: np.ndarray, body: np.ndarray) -> int:
        places = np.flatnonzero(values).astype(np.int32)
        found = np.concatenate([places.view(np.uint8), values[places].view(np.uint8)])
        body[: found.size] = found
        return found.size

    def decode_body(self, body: np.ndarray, values: np.ndarray) -> None:
        places, kept = np.split(np.frombuffer(body.tobytes(), np.int32), 2)
        values[:] = 0
        values[places] = kept.view(np.float32)
