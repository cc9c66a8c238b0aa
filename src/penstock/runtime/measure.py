"""Measures a network from inside: alpha, beta, gamma, and the line of the engine's own all-reduce.

All ranks measure together and agree on every time (the slowest rank's counts), so all of them return the same network.
Messages go round a ring, every rank sending and receiving at once, as the collectives do; each size is repeated back to
back, so that a token bucket or a switch buffer cannot flatter it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import median
from time import perf_counter

import numpy as np

from penstock.cost.fit import Fit, fit_line
from penstock.network import Network
from penstock.plan import parse_route
from penstock.program import Collective
from penstock.runtime.communicator import Communicator
from penstock.runtime.largest import WAIT_SECONDS, largest
from penstock.runtime.measure_codecs import measure_codecs
from penstock.runtime.reduce import Merge, merge_kernel
from penstock.runtime.transport import Bytes, Transport

SIZES = tuple(1 << exponent for exponent in range(10, 25, 2))  # 1 KiB to 16 MiB
LARGER = (1 << 25, 1 << 26)  # of compressed all-reduces, which a processor's cache flatters up to here
LARGEST = 1 << 26  # of dense ones: a startup hides behind its own transfer, and up to 16 MiB the line is too flat
BUCKET = 1 << 20  # the smallest compressed message that a line is fitted to; see `measure_lines`
PAIRS, NUMELS = 128, (1 << 14, 1 << 9)  # of the bucket that shows what each tensor costs: matrices, each with a vector
NATIVE = "native"  # the engine's own all-reduce
TAG = 1
_PILOTS = 1  # untimed rounds that open connections and find out how many timed ones the budget allows
_LEAST, _MOST = 3, 50  # timed rounds per size
_BLOCKS = 5  # of such rounds, of which the median counts
_SURELY = 1 << 22  # measured whatever the budget: below 4 MiB a busy machine's noise hides the bandwidth
_WARM = 1 << 20  # bytes of the untimed rounds that compile a codec
_WHOLE = 1 << 29  # of one message: two buffers of it on every rank
_SHARE = 0.06  # of the budget, for one size


@dataclass(frozen=True, slots=True)
class Measurement:
    """A network and how well its lines describe what was measured."""

    network: Network
    fits: dict[str, Fit]  # "link", "merge" and the strategies, those that were measured


def measure_network(
    transport: Transport,
    name: str = "measured",
    seconds: float = 4.0,
    strategies: Sequence[str] = (NATIVE,),
    codecs: Sequence[str] = (),
    whole_nbytes: int = 0,
    most_nbytes: int = LARGEST,
) -> Measurement:
    """Measure within about `seconds`; every rank must call this at the same time.

    `strategies` are all-reduces whose lines are measured as they run: the engine's own, and any of ours, dense or
    through a codec (`ring+onebit`). `codecs` are compressors whose curves are measured too, in a quarter of the time
    again for each. `whole_nbytes` are the gradients of a model, where that is known: compressed all-reduces are then
    measured up to one message with all of them. Dense messages of more than 16 MiB are left out where `most_nbytes` is
    less than they take: buffers are memory that training may not have.
    """
    world_size = transport.world_size
    curves = measure_codecs(codecs, transport, seconds / 4)
    kernel = merge_kernel("float32")  # compiled before the clock starts
    merge = fit_line(_agreed_points(transport, partial(_merge_round, kernel), seconds / 8), "summation times")
    gamma = merge.line.b_seconds_per_byte
    if world_size == 1:
        return Measurement(Network(1, 0.0, 0.0, gamma, codecs=curves, name=name), {"merge": merge})
    link = fit_line(_agreed_points(transport, _link_round, seconds * 3 / 8), "point-to-point times")
    lines = measure_lines(transport, strategies, seconds / 2, whole_nbytes, most_nbytes)
    network = Network(
        workers=world_size,
        alpha_seconds=link.line.a_seconds,
        beta_seconds_per_byte=link.line.b_seconds_per_byte,
        gamma_seconds_per_byte=gamma,
        all_reduce={strategy: fit.line for strategy, fit in lines.items()},
        codecs=curves,
        name=name,
    )
    return Measurement(network, {"merge": merge, "link": link, **lines})


def measure_lines(
    transport: Transport,
    strategies: Sequence[str],
    seconds: float = 2.0,
    whole_nbytes: int = 0,
    most_nbytes: int = LARGEST,
) -> dict[str, Fit]:
    """Measure all-reduces as they run, by name, as `measure_network` does.

    What compressed messages take is no line: small ones have a startup of their own, while a large one also waits for
    its first block to be encoded and its last to be decoded. (ring+onebit on 4 hosts: 4 ms at 16 KB, then about
    5.5 ms + 0.82 ns per byte from 4 to 64 MB.) A line through all of them has half the startup of a bucket, and a
    planner that believes it sends too many. So it is fitted to messages as large as buckets are; below, it is too high.
    Nor do they go on as they began: at 256 MB the same ring took 1.15 times what 4 to 64 MB promise, parameter servers
    0.8 times. One message of `whole_nbytes` tells.
    """
    communicator = Communicator(transport, timeout_seconds=WAIT_SECONDS)
    fits = {}
    for strategy in strategies:
        one_round = _native_round if strategy == NATIVE else _route_round(communicator, strategy)
        compressed = "+" in strategy
        if compressed:  # codecs are compiled on their first calls, and not by all ranks at once
            _agreed_seconds(transport, one_round, _noise(_WARM), np.zeros(_WARM, np.uint8), _LEAST)
        share = seconds / len(strategies)
        points = _agreed_points(transport, one_round, share, (*SIZES, *LARGER) if compressed else SIZES)
        if not compressed:
            points += _largest_point(transport, one_round, share, points[-1]) if most_nbytes >= LARGEST else []
        elif whole_nbytes > 1.5 * points[-1][0]:
            points.append(_whole_point(transport, one_round, whole_nbytes))
        large = [point for point in points if point[0] >= BUCKET] if compressed else points
        fit = fit_line(large, f"all-reduce times by {strategy}")
        fits[strategy] = _with_tensors(transport, communicator, strategy, fit) if compressed else fit
    return fits


Round = Callable[[Transport, Bytes, Bytes], None]  # does once what is timed, on two buffers of one size


def _agreed_points(
    transport: Transport, one_round: Round, seconds: float, sizes: Sequence[int] = SIZES
) -> list[tuple[float, float]]:
    """Return (bytes, seconds per round) for growing sizes until the budget is spent."""
    points: list[tuple[float, float]] = []
    left = seconds
    surely = _SURELY if sizes is SIZES else LARGER[0]  # what is compressed takes a quarter of the time, or less
    for size in sizes:
        first, second = _noise(size), np.zeros(size, np.uint8)
        pilot = _agreed_seconds(transport, one_round, first, second, _PILOTS)
        rounds = min(max(int(_SHARE * seconds / pilot), _LEAST), _MOST)
        blocks = 1 if sizes is SIZES else _LEAST  # codecs and messages compete for cores: one hiccup in three is common
        times = [_agreed_seconds(transport, one_round, first, second, -(-rounds // blocks)) for _ in range(blocks)]
        points.append((float(size), median(times)))
        left -= rounds * points[-1][1]
        if size >= surely and _LEAST * 4 * points[-1][1] > left:  # the next size is four times as large
            break
    return points


def _largest_point(
    transport: Transport, one_round: Round, seconds: float, last: tuple[float, float]
) -> list[tuple[float, float]]:
    """Return (bytes, seconds) of the largest size, where a round takes no more than half of the budget.

    The better of two rounds: so few cannot be told from a hiccup by their mean.
    """
    size, taken = last
    if size < SIZES[-1] or taken * LARGEST / size > seconds / 2:
        return []
    values = np.full(LARGEST // 4, 1e-12, np.float32).view(np.uint8)  # noise would take longer than the round
    return [(float(LARGEST), min(_agreed_seconds(transport, one_round, values, values, 1) for _ in range(2)))]


def _whole_point(transport: Transport, one_round: Round, nbytes: int) -> tuple[float, float]:
    """Return (bytes, seconds) of a compressed message with all gradients of a model."""
    size = min(nbytes, _WHOLE) // _WARM * _WARM
    first, second = np.tile(_noise(_WARM), size // _WARM), np.zeros(size, np.uint8)
    _agreed_seconds(transport, one_round, first, second, 2)  # touches the memory, and puts feedback off
    return float(size), median(_agreed_seconds(transport, one_round, first, second, 1) for _ in range(_LEAST))


def _noise(nbytes: int) -> Bytes:
    """Return small Gaussian values: what a codec does may depend on them, and sums of sums must not overflow."""
    values = np.random.default_rng(nbytes).standard_normal(nbytes // 4, np.float32)
    values *= np.float32(1e-12)
    return values.view(np.uint8)


def _agreed_seconds(transport: Transport, one_round: Round, first: Bytes, second: Bytes, rounds: int) -> float:
    largest(transport, 0.0)  # start together
    start = perf_counter()
    for _ in range(rounds):
        one_round(transport, first, second)
    return max(largest(transport, (perf_counter() - start) / rounds), 1e-9)


def _link_round(transport: Transport, outgoing: Bytes, incoming: Bytes) -> None:
    after, before = (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size
    receiving = transport.irecv(incoming, before, TAG)
    sending = transport.isend(outgoing, after, TAG)
    receiving.wait(WAIT_SECONDS)
    sending.wait(WAIT_SECONDS)


def _native_round(transport: Transport, values: Bytes, _: Bytes) -> None:
    transport.native(Collective.ALL_REDUCE, values.view(np.float32), "float32", 0, WAIT_SECONDS)


def _route_round(communicator: Communicator, text: str, parts: Sequence[int] | None = None) -> Round:
    """Return what carries out one all-reduce by a route, `ring` or `ring+onebit/4`, of tensors that end at `parts`."""
    route = parse_route(text)
    if route.codec is None:
        return lambda _, values, __: communicator.all_reduce(values.view(np.float32), strategy=route.strategy)
    from penstock.codecs.feedback import PutOff
    from penstock.codecs.wire import wire_codec

    codec = wire_codec(route.codec)
    kept = PutOff(np.empty(0, np.float32))

    def compressed(_: Transport, values: Bytes, residual: Bytes) -> None:
        nonlocal kept
        memory = residual.view(np.float32)
        if kept.memory.ctypes.data != memory.ctypes.data:
            kept = PutOff(memory)
        communicator.all_reduce(values.view(np.float32), route.strategy, codec, kept, parts, **route.options)

    return compressed


def _with_tensors(transport: Transport, communicator: Communicator, text: str, fit: Fit) -> Fit:
    """Return the line with what every further tensor of a bucket adds: many small ones against one as large.

    They take turns, and there are many of them: a model has hundreds of tensors, and a time for each that is off by
    0.1 ms, as the difference of two single messages easily is, would be most of the prediction.
    """
    ends = tuple(accumulate(NUMELS * PAIRS, initial=0))
    timers = [_timer(transport, communicator, text, bounds) for bounds in ((0, ends[-1]), ends)]
    whole, cut = zip(*([timer(_LEAST) for timer in timers] for _ in range(_BLOCKS)), strict=True)
    further = max(0.0, (median(cut) - median(whole)) / (len(ends) - 2))
    return replace(fit, line=replace(fit.line, c_seconds_per_tensor=further))


def _timer(
    transport: Transport, communicator: Communicator, text: str, bounds: Sequence[int]
) -> Callable[[int], float]:
    """Return what times so many rounds of one bucket, warmed up."""
    one_round, values = _route_round(communicator, text, bounds), _noise(4 * bounds[-1])
    timer = partial(_agreed_seconds, transport, one_round, values, np.zeros(values.size, np.uint8))
    timer(_PILOTS)
    return timer


def _merge_round(kernel: Merge, _: Transport, out: Bytes, other: Bytes) -> None:
    kernel(out.view(np.float32), other.view(np.float32))
