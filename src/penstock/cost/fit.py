"""Fits cost lines to measured points, robustly, and says how good the fit is.

Message sizes span five decades. Residuals are divided by the root of the measured time: undivided, the largest message
alone would decide; divided by the time itself, the small ones would, and real engines are no straight line there (a
collective's startup hides behind its own transfer). Outliers (a scheduler's hiccup) are weighed down by Huber's rule,
iterated to convergence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FitError
from penstock.network import LinearCost

Points = Sequence[tuple[float, float]]  # (bytes, seconds)
_HUBER = 1.345  # standard deviations beyond which a point's pull no longer grows; the usual constant
_ROUNDS = 50
_TRIES = 4  # measurements before it is said that no line describes them


@dataclass(frozen=True, slots=True)
class Fit:
    """A line and how well it describes the points."""

    line: LinearCost
    median_error: float  # median of |measured - line| / measured
    worst_error: float  # maximum of the same
    points: int
    least_seconds: float  # of all points


def fit_line(points: Points, what: str = "points") -> Fit:
    """Fit `a + b M` with a, b >= 0 to measured (bytes, seconds).

    Refuses points that cannot determine such a line: fewer than two sizes, a non-positive time, or times that do not
    grow with size. `what` names the measurement in errors.
    """
    nbytes, seconds = _checked(points, what)
    _check_growth(nbytes, seconds, what)
    a, b = _huber(nbytes, seconds)
    if b < 0:
        raise FitError(f"{what} fall with size: a line has {b:.3g} s per byte; measure longer, or larger messages")
    if a < 0:  # a line through the origin: the startup is too small to be seen
        a, b = 0.0, float(np.median(seconds / np.maximum(nbytes, 1e-300)))
    return _with_errors(LinearCost(a, b), nbytes, seconds)


def _with_errors(line: LinearCost, nbytes: NDArray[np.float64], seconds: NDArray[np.float64]) -> Fit:
    errors = np.abs(seconds - (line.a_seconds + line.b_seconds_per_byte * nbytes)) / seconds
    return Fit(line, float(np.median(errors)), float(errors.max()), len(seconds), float(seconds.min()))


def fit_measured(measure: Callable[[], Points], what: str) -> Fit:
    """Fit a line to what `measure` returns; where that gives none, measure again, a few times.

    Of each size the least time counts that was seen so far: whatever else a machine does only ever adds. Ranks that
    agree on their points agree on measuring again. Times that still do not grow do so by less than they vary: they get
    the steepest line that would not have been seen. Training on links too fast to be measured gets a plan all the same.
    """
    least: dict[float, float] = {}
    for _ in range(_TRIES - 1):
        _keep_least(least, measure())
        try:
            return fit_line(list(least.items()), what)
        except FitError:
            continue
    _keep_least(least, measure())
    points = list(least.items())
    try:
        return fit_line(points, what)
    except FitError:
        nbytes, seconds = _checked(points, what)
        if np.ptp(seconds) == 0:  # a clock too coarse for any of them
            raise
        return _with_errors(LinearCost(float(seconds.min()), float(np.ptp(seconds) / nbytes.max())), nbytes, seconds)


def _keep_least(least: dict[float, float], points: Points) -> None:
    for nbytes, seconds in points:
        least[nbytes] = min(seconds, least.get(nbytes, seconds))


def _checked(points: Points, what: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    table = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    nbytes, seconds = table[:, 0], table[:, 1]
    if not np.isfinite(table).all() or (nbytes < 0).any() or (seconds <= 0).any():
        raise FitError(f"{what}: a size or time is negative, zero or not finite; wanted sizes >= 0 and times > 0")
    if len(np.unique(nbytes)) < 2:
        raise FitError(f"{what}: {len(np.unique(nbytes))} different sizes; wanted at least 2, measure more sizes")
    return nbytes, seconds


def _check_growth(nbytes: NDArray[np.float64], seconds: NDArray[np.float64], what: str) -> None:
    sizes = np.unique(nbytes)
    medians = np.array([np.median(seconds[nbytes == size]) for size in sizes])
    slopes = [
        (medians[j] - medians[i]) / (sizes[j] - sizes[i]) for i in range(len(sizes)) for j in range(i + 1, len(sizes))
    ]
    if np.median(slopes) < 0 or medians[-1] <= medians[0]:  # 0: small messages all take one tick of a coarse clock
        found = f"{sizes[0]:.0f} bytes took {medians[0]:.3g} s and {sizes[-1]:.0f} bytes {medians[-1]:.3g} s"
        raise FitError(f"{what} do not grow with size: {found}; measure longer, or larger messages")


def _huber(nbytes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    weights = np.ones_like(seconds)
    a, b = 0.0, 0.0
    for _ in range(_ROUNDS):
        before = a, b
        a, b = _weighted_line(nbytes, seconds, weights / seconds)
        residuals = np.abs(seconds - (a + b * nbytes)) / np.sqrt(seconds)
        spread = max(1.4826 * float(np.median(residuals)), 1e-12)
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(residuals, 1e-300))
        if np.allclose((a, b), before, rtol=1e-12, atol=0.0):
            break
    return a, b


def _weighted_line(
    nbytes: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float, float]:
    """Return a, b of the least squares of `weights (seconds - a - b nbytes)^2`, about the centre of the points.

    By hand: a process that trains would otherwise load LAPACK for it, 1.7 MB of code that stays.
    """
    total = weights.sum()
    middle, height = (weights * nbytes).sum() / total, (weights * seconds).sum() / total
    off = nbytes - middle
    b = float((weights * off * (seconds - height)).sum() / (weights * off * off).sum())
    return float(height - b * middle), b
