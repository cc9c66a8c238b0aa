"""Measures compressed all-reduces as they run: `a + b bytes + c tensors`, of messages as large as buckets are.

What they take is no line: small ones have a startup of their own, while a large one also waits for its first block to
be encoded and its last to be decoded. (ring+onebit on 4 hosts: 4 ms at 16 KB, then about 5.5 ms + 0.82 ns per byte from
4 to 64 MB.) A line through all of them has half the startup of a bucket, and a planner that believes it sends too many.
So it is fitted to messages as large as buckets are; below, it is too high, and what the shortest takes is kept beside
it. Nor do they go on as they began: at 256 MB the same ring took 1.15 times what 4 to 64 MB promise, parameter servers
0.8 times. One message with all gradients of a model tells.

What a rank's process takes of the cores meanwhile is kept too, of the shortest message and for each byte: where ranks
share cores, several buckets under way at a time cannot have more of them than there are.

Whatever can be as in training is: feedback is put off, and means are taken instead of sums, so that a message can be
sent again and again from the same memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import numpy as np

from penstock.codecs.low_rank import Factor, Factoring, LowRank, Matrix, near_square
from penstock.cost.fit import Fit, fit_measured
from penstock.network import LinearCost, least_nbytes
from penstock.plan import parse_route
from penstock.runtime.communicator import Communicator
from penstock.runtime.pages import fresh_pages
from penstock.runtime.timed import LEAST, PILOTS, WAIT_SECONDS, CoreClock, Points, Round, agreed_seconds, noise
from penstock.runtime.transport import Bytes, Transport

SIZES = (1 << 21, 1 << 23, 1 << 25, 1 << 26)  # a processor's cache flatters codecs up to the third
PAIRS, NUMELS = 128, (1 << 14, 1 << 9)  # of the bucket that shows what each tensor costs: matrices, each with a vector
_FEW_PAIRS, _SHORT = 32, 0.6  # where less than so many seconds are allowed for it: a program for many takes as long
_TOGETHER = 2  # messages back to back, at least: a rank that is done begins the next, and buckets do follow one another
_TURNS, _FEWEST = 5, 2  # through all sizes, of which the median counts: at most, and whatever the budget
_SURELY = 1 << 23  # bytes that are measured whatever the budget; more where the fewest turns fit into it
_POINTS_SHARE = 0.7  # of the budget, for sizes; the rest is for what each tensor adds
_SHORTEST = 5  # of the shortest messages, back to back
_WARM = 1 << 20  # bytes of the untimed rounds that compile a codec
_WHOLE = 1 << 29  # of one message: two buffers of it on every rank


def compressed_line(transport: Transport, text: str, seconds: float, whole_nbytes: int) -> Fit:
    """Return the line of a route such as `ring+onebit/4`, in about `seconds` where two turns fit into them.

    `whole_nbytes` are all gradients of a model, 0 where they are not known.
    """
    communicator = Communicator(transport, timeout_seconds=WAIT_SECONDS)  # with the memory of these messages
    one_round = compressed_round(communicator, text)
    # Codecs are compiled on their first calls, and not by all ranks at once.
    agreed_seconds(transport, one_round, noise(_WARM), fresh_pages(_WARM), LEAST)

    clock, used = CoreClock(transport), dict[float, float]()  # of the cores, by bytes

    def points() -> Points:
        found = _points_in_turn(transport, one_round, seconds * _POINTS_SHARE, clock, used)
        larger = whole_nbytes > 1.5 * found[-1][0]
        return [*found, _whole_point(transport, one_round, whole_nbytes, clock, used)] if larger else found

    fit = fit_measured(points, f"all-reduce times by {text}")
    further = _further_tensor(communicator, text, seconds * (1 - _POINTS_SHARE))
    line = replace(fit.line, c_seconds_per_tensor=further)
    return replace(fit, line=with_cores(transport, line, one_round, clock, *max(used.items())))


def with_cores(
    transport: Transport, line: LinearCost, one_round: Round, clock: CoreClock, nbytes: float, used: float
) -> LinearCost:
    """Return a line with what the shortest of its messages takes, and what messages take of the cores.

    Most tensors of a model are small. `used` is what a rank's process takes of the cores for a long message.
    """
    few = least_nbytes(transport.world_size)
    timed = partial(agreed_seconds, transport, one_round, noise(few), fresh_pages(few))
    timed(PILOTS + 1)
    turns = [clock.seconds(partial(timed, _SHORTEST)) for _ in range(LEAST)]
    times, shortest = [seconds for seconds, _ in turns], median(taken for _, taken in turns) / _SHORTEST
    per_byte = max(0.0, used - shortest) / (nbytes - few)
    return replace(line, least_seconds=median(times), least_core_seconds=shortest, core_seconds_per_byte=per_byte)


def _points_in_turn(
    transport: Transport, one_round: Round, seconds: float, clock: CoreClock, used: dict[float, float]
) -> Points:
    """Return (bytes, seconds per round) of compressed messages, the median of several turns through all sizes.

    What the largest takes of the cores is noted in `used`.

    Codecs and messages compete for cores, and a machine is busy for seconds at a time: that spoils a turn, where it
    would spoil a size, and with it the slope of the line. The first rounds of each size say how many turns, and which
    sizes, the budget allows.
    """
    timers: dict[int, Callable[[int], float]] = {}
    a_turn = last = 0.0  # through the sizes so far, and of the last of them
    for size in SIZES:
        if size > _SURELY and _turns(a_turn + last * size / max(timers), seconds) < _FEWEST:
            break
        timers[size] = time = partial(agreed_seconds, transport, one_round, _much_noise(size), fresh_pages(size))
        time(PILOTS)  # touches the memory, and makes the program for it
        last = _TOGETHER * time(1)
        a_turn += last
    turns = min(max(_turns(a_turn, seconds), _FEWEST), _TURNS)
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in timers}  # seconds, and of the cores
    for _ in range(turns):
        for size, timer in timers.items():
            found[size].append(clock.seconds(partial(timer, _TOGETHER)))
    largest = max(timers)
    used[largest] = median(taken for _, taken in found[largest]) / _TOGETHER  # of the turns whose seconds count
    return [(float(size), median(seconds for seconds, _ in each)) for size, each in found.items()]


def _turns(seconds_per_turn: float, seconds: float) -> int:
    """Return how many turns fit into a budget after the pilot rounds, which take as long as one."""
    return int(seconds / seconds_per_turn) - 1


def _whole_point(
    transport: Transport, one_round: Round, nbytes: int, clock: CoreClock, used: dict[float, float]
) -> tuple[float, float]:
    """Return (bytes, seconds) of a compressed message with all gradients of a model; its cores are noted in `used`."""
    size = min(nbytes, _WHOLE) // _WARM * _WARM
    first, second = _much_noise(size), fresh_pages(size)
    timed = partial(agreed_seconds, transport, one_round, first, second)
    timed(2)  # touches the memory, and puts feedback off
    turns = [clock.seconds(partial(timed, _TOGETHER)) for _ in range(LEAST)]
    used[size] = median(taken for _, taken in turns) / _TOGETHER
    return float(size), median(seconds for seconds, _ in turns)


def _much_noise(nbytes: int) -> Bytes:
    """Return small Gaussian values for many bytes, a multiple of `_WARM`: made in less time, they repeat."""
    pages = fresh_pages(nbytes)
    pages.reshape(-1, _WARM)[:] = noise(_WARM)
    return pages


def compressed_round(communicator: Communicator, text: str, parts: Sequence[int] | None = None) -> Round:
    """Return what carries out one all-reduce by a route, of tensors that end at `parts`."""
    from penstock.codecs.feedback import DeferredResidual
    from penstock.codecs.registry import make_codec

    route = parse_route(text)
    assert route.codec is not None
    codec, scale = make_codec(route.codec), 1 / communicator.transport.world_size
    if isinstance(codec, LowRank):
        factored = factored_round(codec, communicator.prepare_all_reduce(route.strategy).run, scale, parts)
        return lambda _, values, residual: factored(values.view(np.float32), residual.view(np.float32))
    kept: dict[tuple[int, int], DeferredResidual] = {}  # by place and size

    def compressed(_: Transport, values: Bytes, residual: Bytes) -> None:
        key = residual.ctypes.data, residual.size
        if key not in kept:
            kept[key] = DeferredResidual(residual.view(np.float32))
        communicator.all_reduce(
            values.view(np.float32), route.strategy, codec, kept[key], parts, scale, **route.options
        )

    return compressed


def factored_round(
    codec: LowRank, add_up: Callable[[Any], None], scale: float, parts: Sequence[int] | None = None
) -> Callable[[Any, Any], None]:
    """Return what averages flat float32 values by low-rank factors, given their residual, as training does.

    Each tensor is a matrix as near to a square as can be; what they take depends on shapes less than on elements.
    """
    kept: dict[int, tuple[Factoring, list[Factor]]] = {}  # by elements

    def factored(values: Any, residual: Any) -> None:
        if len(values) not in kept:
            factoring = _factoring(codec, parts or (0, len(values)))
            first = [factoring.first(each, "measured", values) for each in factoring.matrices]
            kept[len(values)] = factoring, first
        factoring, factors = kept[len(values)]
        values *= scale
        residual += values
        after = factoring.average(residual, values, factors, add_up, lambda _: True)
        kept[len(values)] = factoring, after or factors

    return factored


def _factoring(codec: LowRank, ends: Sequence[int]) -> Factoring:
    """Return tensors that end at `ends` as near-square matrices, those that are too small dense."""
    shapes = [(start, *near_square(stop - start)) for start, stop in pairwise(ends)]
    matrices = [Matrix(*each) for each in shapes if codec.gains(*each[1:])]
    dense = [(start, start + rows * columns) for start, rows, columns in shapes if not codec.gains(rows, columns)]
    return Factoring(codec, matrices, dense)


def _further_tensor(communicator: Communicator, text: str, seconds: float) -> float:
    """Return what every further tensor of a bucket adds: many small ones against one as large.

    They take turns, as many as the budget allows, and there are many of them: a model has hundreds of tensors, and a
    time for each that is off by 0.1 ms, as the difference of two single messages easily is, would be most of the
    prediction.
    """
    ends = tuple(accumulate(NUMELS * (_FEW_PAIRS if seconds < _SHORT else PAIRS), initial=0))
    whole, cut = _timer(communicator, text, (0, ends[-1])), _timer(communicator, text, ends)
    pilot = whole(1) + cut(1)
    rounds = min(max(int(seconds / _FEWEST / pilot), 1), LEAST)
    turns = min(max(int(seconds / rounds / pilot), _FEWEST), _TURNS)
    found = [(whole(rounds), cut(rounds)) for _ in range(turns)]
    added = median(seconds for _, seconds in found) - median(seconds for seconds, _ in found)
    return max(0.0, added / (len(ends) - 2))


def _timer(communicator: Communicator, text: str, bounds: Sequence[int]) -> Callable[[int], float]:
    """Return what times so many rounds of one bucket, warmed up."""
    one_round, values = compressed_round(communicator, text, bounds), noise(4 * bounds[-1])
    residual = fresh_pages(values.size)
    timer = partial(agreed_seconds, communicator.transport, one_round, values, residual)
    timer(PILOTS)
    return timer
