"""Makes the clock of a bucket's program take what was measured of its route: how long, and how much of the cores.

A route is measured as a whole: the time of a message with next to nothing in it and of long ones, and what a rank's
process takes of the cores meanwhile (`network.LinearCost`). Both together say what another bucket could do in the same
time. What a rank computes is what the cores were taken for: every message and computation takes as much as in the
shortest message, and the codec's work on the bytes the rest. Bytes take the wire what they do. What is left of the
measured time is the latency of messages, during which nothing is held.

    ring+onebit, 4 ranks on 2 cores, next to nothing to send: 4 ms, of which each rank takes 0.9 ms of a core

    cores     4 x 0.9 ms / 2          1.8 ms that several buckets under way at a time cannot share
    latency   of 6 messages in a row  2.2 ms that they can
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate

from penstock.cost.ways import Way
from penstock.network import LinearCost, Network, least_nbytes
from penstock.plan import Bucket, Route
from penstock.program import Op, Program
from penstock.simulator.fitted import ITEMSIZE, chosen_strategy, codec_cost
from penstock.simulator.program import CodecCost, Overhead, Step, Translation, program_seconds, steps_of
from penstock.strategies import Options, build, build_coded_part, build_compressed, build_part

BUCKET_NBYTES = 1 << 21  # from where a measured line holds; shorter messages take less
_SECANTS, _CLOSE = 4, 0.01  # steps to find a latency, and how far off what it makes of a program may be


@dataclass(frozen=True, slots=True)
class Clock:
    """What one program's clock needs beside the network."""

    itemsize: float = ITEMSIZE  # bytes of a position
    codec: CodecCost = field(default_factory=CodecCost)
    native_seconds: Callable[[float], float] | None = None  # of the engine's own collective, by its bytes
    pace: float = 1.0  # multiplies all of its durations
    overhead: Overhead | None = None  # of its messages and computations, as measured; None: not measured
    steps: Sequence[Step] = ()  # of the program, which is timed several times; (): not known


def clock_of(network: Network, workers: int, bucket: Bucket, numels: Sequence[int], way: Way) -> tuple[Program, Clock]:
    """Return the program of a bucket whose tensors have so many elements, and its clock.

    By itself it takes what its way says: beyond what can be measured of its parts all durations are longer or shorter
    alike, as all of them are where the route's share of the cores is not known. A tensor too small to be cut has a
    program of fewer instructions than the shortest message that was measured; it takes what so many of them took
    (ring+onebit, 4 ranks on two cores: 4 KB in 6 messages 1.7 ms, 16 KB in 24 messages 4.7 ms).
    """
    program, clock = _shape(network, workers, bucket.route, tuple(numels))
    if clock.native_seconds is not None:
        wanted = way.seconds(bucket.nbytes, len(numels))
        return program, replace(clock, native_seconds=lambda _: wanted)
    line = network.all_reduce.get(str(bucket.route)) if workers == network.workers else None
    if line is None or line.least_seconds is None:
        return program, _paced(program, network, clock, way.seconds(bucket.nbytes, len(numels)))
    short, its_clock = _shape(network, workers, bucket.route, (least_nbytes(workers) // ITEMSIZE,))
    overhead = _overhead(network, bucket.nbytes, line, len(numels), program, clock, short)
    if _instructions(program) < _instructions(short):
        least = replace(its_clock, overhead=_overhead(network, least_nbytes(workers), line, 1, short, its_clock, short))
        known = _paced(short, network, least, line.least_seconds).overhead
        assert known is not None
        return program, replace(clock, overhead=replace(known, factor=overhead.factor))
    wanted = _measured_seconds(way, line, bucket.nbytes, len(numels))
    return program, _paced(program, network, replace(clock, overhead=overhead), wanted)


def _measured_seconds(way: Way, line: LinearCost, nbytes: int, tensors: int) -> float:
    """Return what a message takes: its line from buckets' size on, and below on the way to that of the shortest."""
    assert line.least_seconds is not None
    if nbytes >= BUCKET_NBYTES:
        return way.seconds(nbytes, tensors)
    part, more = nbytes / BUCKET_NBYTES, way.seconds(nbytes, tensors) - way.seconds(nbytes, 1)
    return line.least_seconds + part * max(0.0, way.seconds(BUCKET_NBYTES, 1) - line.least_seconds) + more


def _overhead(
    network: Network, nbytes: int, line: LinearCost, tensors: int, program: Program, clock: Clock, short: Program
) -> Overhead:
    """Return what makes a program take of the cores what was measured; its latency is not known yet.

    `short` is the program of the shortest message that was measured.
    """
    assert line.least_core_seconds is not None
    least, count = _instructions(short), _instructions(program)
    each = line.least_core_seconds / least
    further = (line.c_seconds_per_tensor or 0.0) / network.ranks_per_core * (tensors - 1)
    of_bytes = (line.core_seconds_per_byte or 0.0) * nbytes + further
    computed = _computed(network, program, clock)
    left = max(0.0, of_bytes - each * max(0.0, count - least))  # long messages were measured with all their blocks
    return Overhead(each, 0.0, left / computed if computed else 1.0)


def _computed(network: Network, program: Program, clock: Clock) -> float:
    """Return the seconds that a rank computes for a program, on average, as its codec's curves say."""
    values = network, clock.itemsize, clock.codec, clock.native_seconds
    tasks, _ = Translation(program, *values, steps=clock.steps).tasks()
    return sum(task.seconds for task in tasks if task.pool is not None) / program.world_size


def _instructions(program: Program) -> float:
    """Return how many messages a rank receives and computations it does, on average."""
    return max(1, sum(one.op is not Op.SEND for rank in program.ranks for one in rank)) / program.world_size


def _messages(program: Program) -> float:
    """Return how many messages a rank receives, on average."""
    return max(1, sum(one.op is Op.RECV for rank in program.ranks for one in rank)) / program.world_size


def _paced(program: Program, network: Network, clock: Clock, wanted: float) -> Clock:
    """Return the clock with which a program by itself takes so long.

    What is missing is latency. Where it takes longer, some of what was measured of the cores is taken while bytes
    travel, by the engine's thread, and not for computations, which messages wait for.
    """

    def alone(overhead: Overhead | None) -> float:
        return program_seconds(program, network, clock.itemsize, clock.codec, overhead, clock.steps)

    taken, known = alone(clock.overhead), clock.overhead
    if known is None:
        return replace(clock, pace=wanted / taken if taken else 1.0)
    if taken < wanted:
        change, guess, most = partial(_late, known), wanted - taken, math.inf
    else:
        spent = known.factor * _computed(network, program, clock) / _messages(program)
        change, guess, most = partial(_moving, known, spent), 1 - wanted / taken, 1.0
    found, taken = _solved(lambda x: alone(change(x)), taken, wanted, guess, most)
    return replace(clock, pace=wanted / taken if taken else 1.0, overhead=change(found))


def _late(overhead: Overhead, latency_seconds: float) -> Overhead:
    return replace(overhead, latency_seconds=latency_seconds)


def _moving(overhead: Overhead, computed_seconds: float, share: float) -> Overhead:
    """Return an overhead with a share of computations done while bytes travel; they take so long for each message."""
    return replace(overhead, factor=(1 - share) * overhead.factor, moving_seconds=share * computed_seconds)


def _solved(
    alone: Callable[[float], float], without: float, wanted: float, guess: float, most: float = math.inf
) -> tuple[float, float]:
    """Return the argument, of 0 to `most`, with which a program takes about `wanted`, and what it takes then.

    By secants: what a program takes is a convex function of the latency and, where that is long, a line.
    """
    before, at = (0.0, without), guess
    for _ in range(_SECANTS):
        taken = alone(at)
        if abs(taken - wanted) <= _CLOSE * wanted or at == before[0] or taken == before[1]:
            break
        slope = (taken - before[1]) / (at - before[0])
        before, at = (at, taken), min(most, max(0.0, at + (wanted - taken) / slope))
    else:
        taken = alone(at)
    return at, taken


def instructions(network: Network, workers: int, route: Route, numels: Sequence[int]) -> int:
    """Return about how many instructions a bucket's program has on all ranks: those of the first tell."""
    curves = None if route.codec is None else network.codecs[route.codec]
    strategy, options = chosen_strategy(route, curves)
    sizes = (sum(numels),) if curves is None else tuple(numels)  # a dense program does not know its tensors
    return workers * _part_size(strategy.name, options, workers, sizes, curves is not None)


@lru_cache(maxsize=512)
def _part_size(strategy: str, options: Options, workers: int, numels: tuple[int, ...], coded: bool) -> int:
    if not coded:
        return len(build_part("all_reduce", strategy, 0, workers, sum(numels), options).instructions)
    part, _ = build_coded_part(strategy, 0, workers, tuple(accumulate(numels, initial=0)), options)
    return len(part.instructions)


def _shape(network: Network, workers: int, route: Route, numels: tuple[int, ...]) -> tuple[Program, Clock]:
    """Return a bucket's program, and its clock before anything measured is known."""
    curves = None if route.codec is None else network.codecs[route.codec]
    strategy, options = chosen_strategy(route, curves)
    program, steps = _built(strategy.name, options, workers, numels, curves is not None)
    if curves is None:
        native = any(one.op is Op.NATIVE for one in program.ranks[0])
        return program, Clock(native_seconds=(lambda _: 0.0) if native else None, steps=steps)
    piece_nbytes = ITEMSIZE * sum(numels) / max(program.numel, 1)
    tensors = max(1, round(len(numels) / max(program.numel, 1)))
    return program, Clock(piece_nbytes, codec_cost(curves, piece_nbytes, tensors), steps=steps)


@lru_cache(maxsize=64)  # of up to `composition.MOST_INSTRUCTIONS` each
def _built(
    strategy: str, options: Options, workers: int, numels: tuple[int, ...], coded: bool
) -> tuple[Program, Sequence[Step]]:
    if coded:
        program, _ = build_compressed(strategy, workers, tuple(accumulate(numels, initial=0)), options)
    else:
        program = build("all_reduce", strategy, workers, sum(numels), options)
    return program, steps_of(program)
