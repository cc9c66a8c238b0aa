"""Warm-up of the density: training starts by sending more of the gradient and ends by sending little.

    density = warmup("paper", 0.001)      # 0.25, 0.0725, 0.015, 0.004, then 0.001
    density(epoch)

A schedule is a function of a number that counts from 0: of epochs or of steps, whichever the caller counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

from penstock.errors import CodecError

Schedule = Callable[[int], float]
PAPER = (0.25, 0.0725, 0.015, 0.004)  # gTop-k, section IV-B; 0.0725 as printed, where DGC's row has 0.0625


def warmup(spec: str | Sequence[float] | Schedule | None, density: float) -> Schedule:
    """Return the density of each epoch (or step): those that `spec` gives, then `density`.

    `spec` is None, "paper" (gTop-k's four epochs), "dgc" (a quarter each time until `density` is reached), the
    densities one after the other, or any function, whose word is taken for all time.

    >>> [warmup("dgc", 0.001)(epoch) for epoch in range(6)]
    [0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001]
    >>> [warmup([0.5, 0.1], 0.01)(step) for step in (0, 1, 2, 100)]
    [0.5, 0.1, 0.01, 0.01]
    """
    if callable(spec):
        return Checked(spec)
    if spec is not None and (spec not in _NAMED if isinstance(spec, str) else not isinstance(spec, Sequence)):
        raise CodecError(f"warm-up {spec!r}; wanted {' or '.join(_NAMED)}, a list of densities or a function")
    densities = _NAMED[spec](density) if isinstance(spec, str) else tuple(spec or ())
    return Stages(tuple(_check(one) for one in (*densities, density)))


@dataclass(frozen=True, slots=True)
class Stages:
    """Densities one after the other, the last for good; a value, so that a wrapper that has one can be pickled."""

    densities: tuple[float, ...]

    def __call__(self, count: int) -> float:
        """Return the density of a stage."""
        return self.densities[min(count, len(self.densities) - 1)]


@dataclass(frozen=True, slots=True)
class Checked:
    """A function of the user's, whose answers are looked at."""

    schedule: Schedule

    def __call__(self, count: int) -> float:
        """Return the density of a stage."""
        return _check(self.schedule(count))


def _paper(_density: float) -> tuple[float, ...]:
    return PAPER


def _exponential(density: float) -> tuple[float, ...]:
    """Deep Gradient Compression: 75%, 93.75%, 98.4375% ... of the gradient stay behind."""
    found: list[float] = []
    while 0.25 ** (len(found) + 1) > density > 0:
        found.append(0.25 ** (len(found) + 1))
    return tuple(found)


_NAMED: dict[str, Callable[[float], tuple[float, ...]]] = {"paper": _paper, "dgc": _exponential}


def _check(density: object) -> float:
    if not isinstance(density, Real) or not 0 < float(density) <= 1:
        raise CodecError(f"density {density!r} in a warm-up; wanted more than 0 and at most 1")
    return float(density)
