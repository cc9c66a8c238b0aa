"""What a route costs, from its program: lines fitted to what the simulator says of it at a few sizes.

For strategies without a closed form. A planner is handed `fitted_cost` through `cost.ways` and does not know the
simulator. A program of thousands of ranks may have millions of instructions, so that larger world sizes than can be
timed are reached by doublings: each of a line's numbers grows from one doubling of the ranks to the next by an
increment, and these form a geometric series, which is exact for what grows as p (increments double), as log2 p (they
stay) and for what levels off as 1 - 1/p (they halve).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import log2

from penstock.cost.fit import fit_line
from penstock.curves import CodecCurves, Curve
from penstock.errors import NetworkError
from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.program import Op, Program
from penstock.simulator.program import CodecCost, program_seconds
from penstock.strategies import (
    Options,
    Strategy,
    build,
    build_coded_part,
    build_compressed,
    build_part,
    find_strategy,
    meeting_codec,
    parse_strategy,
)
from penstock.strategies.closed_form import CompressedCost, constants
from penstock.strategies.strategy import coded_block

ITEMSIZE = 4  # bytes of an element: gradients are float32
SIZES = (1 << 16, 1 << 19, 1 << 22)  # elements of the buckets that are timed
MOST_INSTRUCTIONS = 20_000  # of a program that is timed, all ranks together: about a second
_Numbers = tuple[float, float, float]  # seconds of startup, per byte, and per further tensor


def fitted_cost(network: Network, route: Route, workers: int) -> CompressedCost:
    """Return what a bucket costs by `route` on `workers` workers, from its simulated program."""
    curves = None if route.codec is None else network.codecs[route.codec]
    startup, per_byte, further = _numbers(constants(network), curves, route, workers)
    further = min(further, startup)  # the first tensor's own calls are part of the startup
    return CompressedCost(LinearCost(startup - further, per_byte), further)


@lru_cache(maxsize=256)
def _numbers(links: _Numbers, curves: CodecCurves | None, route: Route, workers: int) -> _Numbers:
    """Return the three numbers of a line, timed or reached by doublings; kept for each network and world size.

    `links` are the network's alpha, beta and gamma.
    """
    if workers == 1:
        return 0.0, 0.0, 0.0
    if _instructions(route, curves, workers) <= MOST_INSTRUCTIONS:
        return _timed(Network(1, *links), curves, route, workers)
    base = 1 << (workers - 1).bit_length() - 1
    while _instructions(route, curves, base) > MOST_INSTRUCTIONS:
        base //= 2
    if base < 8:
        raise NetworkError(f"{route}: its program is too large to be timed on {workers} workers; measure it there")
    known = [_numbers(links, curves, route, base // divisor) for divisor in (4, 2, 1)]
    first, second, third = (_continued([each[i] for each in known], log2(workers / base)) for i in range(3))
    return first, second, third


def _continued(values: list[float], doublings: float) -> float:
    """Return what follows three values at p/4, p/2 and p after more doublings, by a geometric series of increments.

    >>> [_continued([4.0, 8.0, 16.0], 1), _continued([2.0, 3.0, 4.0], 3), round(_continued([0.5, 0.75, 0.875], 50), 6)]
    [32.0, 7.0, 1.0]
    """
    before, last = values[1] - values[0], values[2] - values[1]
    if abs(last) <= 1e-12 * abs(values[2]) or before * last <= 0:
        return values[2]
    ratio = min(last / before, 2.0)
    total = doublings if abs(ratio - 1) < 1e-9 else ratio * (ratio**doublings - 1) / (ratio - 1)
    return max(0.0, values[2] + last * total)


def _timed(network: Network, curves: CodecCurves | None, route: Route, workers: int) -> _Numbers:
    """Fit a line to the time of programs of a few sizes; a bucket of two tensors tells what another one adds."""
    seconds = _dense_seconds if curves is None else _coded_seconds(curves)
    points = [(float(ITEMSIZE * numel), seconds(network, route, workers, numel, 1)) for numel in SIZES]
    line = fit_line(points, f"simulated times of {route}").line
    further = 0.0 if curves is None else seconds(network, route, workers, SIZES[1], 2) - points[1][1]
    return line.a_seconds, line.b_seconds_per_byte, max(0.0, further)


_Seconds = Callable[[Network, Route, int, int, int], float]  # (network, route, workers, elements, tensors)


def _dense_seconds(network: Network, route: Route, workers: int, numel: int, tensors: int) -> float:
    name, options = chosen_strategy(route)
    return program_seconds(build("all_reduce", name.name, workers, numel, options), network, ITEMSIZE)


def _coded_seconds(curves: CodecCurves) -> _Seconds:
    def seconds(network: Network, route: Route, workers: int, numel: int, tensors: int) -> float:
        program = _coded_program(route, curves, workers, numel)
        piece_nbytes = ITEMSIZE * numel / program.numel  # of a position, be it one piece or several
        return program_seconds(program, network, piece_nbytes, codec_cost(curves, piece_nbytes, tensors))

    return seconds


def codec_cost(curves: CodecCurves, piece_nbytes: float, tensors: int) -> CodecCost:
    """Return what a codec does to a position of `piece_nbytes`, which is a piece of each of `tensors` tensors."""
    each = piece_nbytes / tensors
    by_op: dict[Op, Curve] = {Op.ENCODE: curves.encode, Op.MERGE: curves.block_merge or curves.decode}

    def seconds(op: Op, nbytes: float) -> float:
        return nbytes / each * by_op.get(op, curves.decode).seconds(each)

    return CodecCost(curves.payload_nbytes(each) / each, seconds)


def _coded_program(route: Route, curves: CodecCurves, workers: int, numel: int) -> Program:
    strategy, options = chosen_strategy(route, curves)
    return build_compressed(strategy.name, workers, (0, numel), options)[0]


def chosen_strategy(route: Route, curves: CodecCurves | None = None) -> tuple[Strategy, Options]:
    """Return the strategy and options of a route, with the blocks that a communicator would choose."""
    name, written = parse_strategy(route.strategy)
    strategy, options = find_strategy(name), Options(**written, **route.options)
    if curves is None or meeting_codec(strategy, options).sparse:
        return strategy, options
    return strategy, replace(options, block_numel=coded_block(curves.payload_nbytes(ITEMSIZE << 20)))


def _instructions(route: Route, curves: CodecCurves | None, workers: int) -> int:
    """Return about how many instructions the largest of the timed programs has: those of two ranks tell."""
    strategy, options = chosen_strategy(route, curves)
    ranks = (0, workers // 2)
    if curves is None:
        parts = [build_part("all_reduce", strategy.name, rank, workers, SIZES[-1], options) for rank in ranks]
    else:
        parts = [build_coded_part(strategy.name, rank, workers, (0, SIZES[-1]), options)[0] for rank in ranks]
    return workers * max(len(part.instructions) for part in parts)
