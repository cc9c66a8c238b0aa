"""The largest value any rank brings: how ranks agree on a time, and how they start together."""

import numpy as np

from penstock.program import Collective
from penstock.runtime.transport import Transport

WAIT_SECONDS = 60.0  # for the slowest rank to come


def largest(transport: Transport, value: float, timeout_seconds: float = WAIT_SECONDS) -> float:
    """Return the largest of all ranks' values; nobody leaves before everybody has come.

    Each rank fills its own place, and a sum brings them together: engines differ in which maxima they offer.
    """
    everyone = np.zeros(transport.world_size)
    everyone[transport.rank] = value
    transport.native(Collective.ALL_REDUCE, everyone, "float64", 0, timeout_seconds)
    return float(everyone.max())
