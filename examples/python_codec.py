"""A codec in Python: eight-bit integers with one step for a tensor, three methods on numpy arrays.

In training it goes where a name goes: `DDP(model, codec=Int8())`. Here two ranks, threads of one process, add their
gradients by it; what rounding leaves is kept in a residual, and sent with the next gradient.
"""

import threading

import numpy as np

from penstock.codecs.codec import PythonCodec
from penstock.runtime import Communicator
from penstock.runtime.transport.memory import Fabric


class Int8(PythonCodec):
    """The nearest of 255 multiples of a 127th of the largest magnitude."""

    name = "int8"

    def max_body_nbytes(self, numel: int) -> int:
        """A float32 and a byte for each value."""
        return 4 + numel

    def encode_body(self, values: np.ndarray, body: np.ndarray) -> int:
        """Write the step, and values in steps."""
        step = np.float32(np.abs(values).max(initial=0) / 127 or 1)
        body[:4] = np.frombuffer(step.tobytes(), np.uint8)
        body[4:] = np.rint(values / step).astype(np.int8).view(np.uint8)
        return body.size

    def decode_body(self, body: np.ndarray, values: np.ndarray) -> None:
        """Multiply."""
        values[:] = body[4:].view(np.int8) * np.frombuffer(body[:4].tobytes(), np.float32)


fabric, gradients = Fabric(2), [np.random.default_rng(rank).standard_normal(1_000_000, np.float32) for rank in (0, 1)]
wanted = gradients[0] + gradients[1]


def work(rank: int) -> None:
    """Add gradients in three steps."""
    communicator, codec = Communicator(fabric.transport(rank)), Int8()
    residual, applied = np.zeros_like(wanted), np.zeros_like(wanted)
    for step in (1, 2, 3):
        total = gradients[rank].copy()
        communicator.all_reduce(total, "ring", codec, residual)
        applied += total
        if rank == 0:
            missing = np.linalg.norm(step * wanted - applied) / np.linalg.norm(step * wanted)
            ratio = total.nbytes / codec.max_nbytes(total.size)
            print(f"step {step}: {ratio:.1f} times fewer bytes, off by {missing:.1%}")


threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
