"""Whether error feedback helps a codec or harms it: found by trying, once per codec.

Feedback converges where a codec leaves less than it was given: over some steps |x - decode(encode(x))| must shrink, in
some norm (Karimireddy et al., 2019, call it a contraction). A quantiser that rounds at random is right on average, but
its noise may be larger than the values: qsgd with 4 bits rounds a value of a bucket of 512 to a multiple of a seventh
of the bucket's norm, so what it leaves is 1.4 times what it was given, and a residual would grow each step. Such
a codec sends what it makes of each gradient and forgets the rest, as its paper has it.
"""

from dataclasses import replace
from itertools import count

import numpy as np

from penstock.codecs.dense.codec import Codec

NUMEL = 4096  # eight buckets of qsgd's; its noise does not depend on more
STEPS = 24  # enough for a growth of 3% a step to show


def contracts(codec: Codec) -> bool:
    """Say whether residuals stay bounded: the same on every rank, as values and random numbers are always the same."""
    probe = replace(codec, seed=0, _calls=count())
    left = np.random.default_rng(0).standard_normal(NUMEL, np.float32)
    before = float(np.linalg.norm(left))
    out = np.zeros(codec.max_nbytes(NUMEL), np.uint8)
    for _ in range(STEPS):
        nbytes = probe.encode(left, None, out)
        probe.decode_add(out[:nbytes], left, -1.0)
    return float(np.linalg.norm(left)) <= before
