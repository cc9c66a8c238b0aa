"""A compressor of one's own: `thirds.cll` beside this, sixteen lines, compiled to machine code and used at once.

In training it goes where a shipped one goes: `DDP(model, codec="examples/thirds.cll")`.
"""

from pathlib import Path

import numpy as np

from penstock.codecs.registry import make_codec

codec = make_codec(str(Path(__file__).with_name("thirds.cll")))
gradient = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
residual = np.zeros_like(gradient)
payload = np.empty(codec.max_nbytes(gradient.size), np.uint8)

arrived = np.zeros_like(gradient)
for step in (1, 2, 3, 4, 5):
    nbytes = codec.encode(gradient, residual, payload)  # what is not sent stays in the residual
    codec.decode_add(payload[:nbytes], arrived)
    missing = np.linalg.norm(step * gradient - arrived) / np.linalg.norm(step * gradient)
    print(f"step {step}: {gradient.nbytes / nbytes:.1f} times fewer bytes, {100 * missing:.0f}% still to come")
