"""From the passes a profiler saw to one `Profile`: the usual order, medians, spread, and what was odd.

Times are medians of the intervals between neighbouring gradients, because an interrupt in one iteration then touches
one tensor and not all that follow; they are scaled to add up to the median backward pass, because medians do not add.
Spread is the interquartile range.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from statistics import median, quantiles

from penstock.trace import Trace


@dataclass(frozen=True, slots=True)
class Pass:
    """One iteration: when the forward pass ended and when each gradient was ready."""

    forward_seconds: float
    ready: tuple[tuple[str, float], ...]  # name and seconds since the start of the forward pass, in order

    @property
    def order(self) -> tuple[str, ...]:
        """The tensors as their gradients became ready."""
        return tuple(name for name, _ in self.ready)

    @property
    def backward_seconds(self) -> float:
        """From the end of the forward pass to the last gradient."""
        return max(seconds for _, seconds in self.ready) - self.forward_seconds

    def intervals(self) -> dict[str, float]:
        """Return how long after the previous gradient each became ready; never negative, even between streams."""
        found, before = {}, self.forward_seconds
        for name, seconds in self.ready:
            found[name] = max(0.0, seconds - before)
            before = max(before, seconds)
        return found


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured trace, how sure its numbers are, and which tensors did not behave."""

    trace: Trace
    iterations: int  # after warm-up
    forward_spread_seconds: float
    backward_spread_seconds: float
    tensor_spread_seconds: tuple[float, ...]  # of each tensor's interval, in the trace's order
    moved: tuple[str, ...]  # became ready in another order in some iterations
    occasional: tuple[str, ...]  # had a gradient in some iterations only
    unused: tuple[str, ...]  # could learn, but never had a gradient; not in the trace


@dataclass(frozen=True, slots=True)
class Times:
    """What the passes say about time and order, without sizes."""

    forward_seconds: float
    forward_spread_seconds: float
    backward_spread_seconds: float
    intervals: dict[str, tuple[float, float]]  # name: median and spread, in the usual order
    moved: tuple[str, ...]
    occasional: tuple[str, ...]


def summarise(passes: Sequence[Pass]) -> Times:
    """Return the times of the most frequent order.

    Only iterations in that order count; tensors that it lacks take their time from the iterations that have them.
    """
    orders = [each.order for each in passes]
    usual = Counter(orders).most_common(1)[0][0]
    counted = [each for each in passes if each.order == usual]
    backward = [each.backward_seconds for each in counted]
    samples = _samples(counted) | {k: v for k, v in _samples(passes).items() if k not in usual}
    intervals = {name: (median(samples[name]), spread(samples[name])) for name in merged_order(usual, orders)}
    total = sum(middle for middle, _ in intervals.values())
    scale = median(backward) / total if total > 0 else 1.0
    return Times(
        forward_seconds=median(each.forward_seconds for each in counted),
        forward_spread_seconds=spread([each.forward_seconds for each in counted]),
        backward_spread_seconds=spread(backward),
        intervals={name: (scale * middle, width) for name, (middle, width) in intervals.items()},
        moved=moved_tensors(usual, orders),
        occasional=tuple(name for name in intervals if any(name not in order for order in orders)),
    )


def _samples(passes: Sequence[Pass]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for each in passes:
        for name, seconds in each.intervals().items():
            found.setdefault(name, []).append(seconds)
    return found


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


def merged_order(usual: Sequence[str], orders: Sequence[Sequence[str]]) -> list[str]:
    """Return `usual` with the tensors it lacks put in after whatever they followed in their own order.

    >>> merged_order("ad", ["ad", "abd", "cad"])
    ['c', 'a', 'b', 'd']
    """
    merged = list(usual)
    for order in orders:
        position = 0
        for name in order:
            if name not in merged:
                merged.insert(position, name)
            position = merged.index(name) + 1
    return merged


def moved_tensors(usual: Sequence[str], orders: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the tensors that stand elsewhere, relative to the others, in any of `orders`.

    >>> moved_tensors("abcd", ["abcd", "bcda"])
    ('a',)
    """
    moved: set[str] = set()
    for order in set(map(tuple, orders)):
        common = [name for name in order if name in usual]
        expected = [name for name in usual if name in order]
        matcher = SequenceMatcher(None, expected, common, autojunk=False)
        kept = {name for block in matcher.get_matching_blocks() for name in common[block.b : block.b + block.size]}
        moved |= set(common) - kept
    return tuple(name for name in usual if name in moved)
