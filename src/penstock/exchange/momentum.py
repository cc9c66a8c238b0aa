"""Momentum of a sparse exchange: as published in gTop-k, or corrected as in Deep Gradient Compression.

Plain (gTop-k): gradients are exchanged, and the optimizer has the momentum. What waits in a residual then misses the
momentum it would have had.

Corrected (DGC, sections 3.1 and 3.2): each rank has its own velocity, and exchanges that; the optimizer has none.

    u = m u + g            v = v + u                 with Nesterov  u = m (u + g), v = v + u + g
    send the largest of v, and where a value was sent, v = 0 (error feedback) and u = 0 (momentum factor masking)

v is the residual of the exchange, so here is only what happens to g before and to u after it. Local clipping (DGC,
section 3.3) scales each rank's gradient to norm `clip / sqrt(P)` before it is added: P independent gradients then sum
to about `clip`.

All functions work in place on flat float32 numpy arrays; a velocity is state, and the caller keeps it.
"""

from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CodecError

Floats = NDArray[np.float32]
MODEL, TENSOR = "model", "tensor"
CLIPPED = (MODEL, TENSOR)


@dataclass(frozen=True, slots=True)
class Momentum:
    """What happens to gradients around a sparse exchange."""

    factor: float = 0.0  # m of the corrected form; 0: plain, the optimizer has the momentum
    nesterov: bool = False
    masking: bool = True  # forget the velocity of what was sent
    clip: float | None = None  # largest L2 norm of the summed gradient; None: no clipping
    clip_by: str = MODEL  # whose norm: that of all gradients together, or that of each tensor by itself

    def __post_init__(self) -> None:
        if not isinstance(self.factor, Real) or not 0 <= self.factor < 1:
            raise CodecError(f"momentum {self.factor!r}; wanted 0 or more and less than 1")
        if self.clip is not None and not (isinstance(self.clip, Real) and self.clip > 0):
            raise CodecError(f"gradients clipped to norm {self.clip!r}; wanted more than 0")
        if self.clip_by not in CLIPPED:
            raise CodecError(f"gradients clipped by {self.clip_by!r}; wanted one of {', '.join(CLIPPED)}")
        if self.nesterov and not self.factor:
            raise CodecError("Nesterov's momentum with factor 0; set the factor, or leave it to the optimizer")

    @property
    def is_used(self) -> bool:
        """Whether gradients are changed before they are exchanged."""
        return bool(self.factor) or self.clip is not None

    @property
    def clips_model(self) -> bool:
        """Whether all gradients of an iteration must be there before the first can be sent."""
        return self.clip is not None and self.clip_by == MODEL

    def shrinks_by(self, norm: float, world_size: int) -> float:
        """Return what a rank's gradient of L2 norm `norm` is multiplied by; gradients that are not finite stay so.

        >>> Momentum(clip=2.0).shrinks_by(5.0, world_size=4)
        0.2
        """
        limit = inf if self.clip is None else self.clip / world_size**0.5
        return limit / norm if limit < norm < inf else 1.0

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


def sent_from(residual: Floats) -> NDArray[np.bool_]:
    """Return where this rank's values left for good: an exchange leaves exactly 0 there (with 32-bit values).

    A rank that merged and kept what others sent does not forget the velocity of that.
    """
    zero: NDArray[np.bool_] = residual == 0
    return zero
