"""Momentum of a sparse exchange: as published in gTop-k, or corrected as in Deep Gradient Compression.

Plain (gTop-k): gradients are exchanged, and the optimizer has the momentum. What waits in a residual then misses the
momentum it would have had.

Corrected (DGC, sections 3.1 and 3.2): each rank has its own velocity, and exchanges that; the optimizer has none.

    u = m u + g            v = v + u                 with Nesterov  u = m (u + g), v = v + u + g
    send the largest of v, and where a value was sent, v = 0 (error feedback) and u = 0 (momentum factor masking)

v is the residual of the exchange, so here is only what happens to g before and to u after it. Local clipping scales
each rank's gradient to norm `clip / sqrt(P)` before it is added: P independent gradients then sum to about `clip`.

All functions work in place on flat float32 numpy arrays; a velocity is state, and the caller keeps it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CodecError

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Momentum:
    """What happens to gradients around a sparse exchange."""

    factor: float = 0.0  # m of the corrected form; 0: plain, the optimizer has the momentum
    nesterov: bool = False
    masking: bool = True  # forget the velocity of what was sent
    clip: float | None = None  # largest L2 norm of the summed gradient; None: no clipping

    def __post_init__(self) -> None:
        if not 0 <= self.factor < 1:
            raise CodecError(f"momentum {self.factor}; wanted 0 or more and less than 1")
        if self.clip is not None and not self.clip > 0:
            raise CodecError(f"gradients clipped to norm {self.clip}; wanted more than 0")
        if self.nesterov and not self.factor:
            raise CodecError("Nesterov's momentum with factor 0; set the factor, or leave it to the optimizer")

    def before(self, gradient: Floats, velocity: Floats | None) -> None:
        """Turn a gradient, already clipped, into what is exchanged, and update the velocity (None where plain)."""
        if not self.factor:
            return
        assert velocity is not None
        m = np.float32(self.factor)
        if self.nesterov:
            velocity += gradient
            velocity *= m
            gradient += velocity
        else:
            velocity *= m
            velocity += gradient
            gradient[:] = velocity

    def after(self, velocity: Floats | None, sent: NDArray[Any]) -> None:
        """Forget the velocity of what was `sent`, given as indices or as a mask of booleans."""
        if self.factor and self.masking:
            assert velocity is not None
            velocity[sent] = 0


def clip_locally(gradients: list[Floats], clip: float, world_size: int) -> float:
    """Scale one rank's gradients to a joint L2 norm of at most clip / sqrt(world_size); return the norm they had.

    >>> gradients = [np.array([3, 4], np.float32)]
    >>> clip_locally(gradients, 2.0, 4), gradients[0].tolist()
    (5.0, [0.6000000238418579, 0.800000011920929])
    """
    norm = float(np.sqrt(sum(float(np.dot(one, one)) for one in gradients)))
    limit = clip / world_size**0.5
    if norm > limit:
        for one in gradients:
            one *= np.float32(limit / norm)
    return norm


def sent_from(residual: Floats) -> NDArray[np.bool_]:
    """Return where this rank's values left for good: an exchange leaves exactly 0 there (with 32-bit values).

    A rank that merged and kept what others sent does not forget the velocity of that.
    """
    zero: NDArray[np.bool_] = residual == 0
    return zero
