"""What the links do under the load of a pipeline: alpha and beta of a message among several in flight.

A message alone pays the engine's whole latency: rendezvous, wake-ups on both sides. In a pipeline that hides behind
the messages before it, and what is left of alpha is how long a message keeps a NIC busy beyond its bytes. The
simulator's alpha is that one, so it is measured as pipelines work: every rank sends to the next and receives from the
one before, a few messages in flight each way. The latency of a message alone is measured beside it, by ping-pong.
"""

from collections import deque
from statistics import median
from time import perf_counter

import numpy as np

from penstock.cost.fit import Points, fit_measured
from penstock.network import Network
from penstock.runtime.executor import WINDOW
from penstock.runtime.reduce import merge_kernel
from penstock.runtime.timed import largest
from penstock.runtime.transport import Transport, Work

# Bytes; the blocks of rings and pipelines of more than 1 MB lie between. Smaller messages would tell about the cores
# of a machine that plays many hosts, not about its links: there a message costs what the cores can do, whatever its
# size, and a line through such points makes alpha too large for every block that is really sent.
SIZES = (131_072, 262_144, 524_288, 2_097_152)
_TAG, _WAIT_SECONDS = 1, 60.0
_ROUNDS, _ROUND_NBYTES, _LEAST_MESSAGES = 5, 8_000_000, 12
_PINGS = 200


def stream_network(transport: Transport, name: str) -> Network:
    """Measure alpha, beta and gamma; all ranks must call this together and all get the same."""
    link = fit_measured(lambda: _points(transport), "times of messages in a stream").line
    return Network(transport.world_size, link.a_seconds, link.b_seconds_per_byte, _gamma(transport), name=name)


def latency_seconds(transport: Transport) -> float:
    """Return the time of one small message alone between the first two ranks: half a ping-pong."""
    message, elapsed = np.zeros(8, np.uint8), []
    _start_together(transport)
    for _ in range(_PINGS if transport.rank < 2 else 0):
        start = perf_counter()
        for turn in (0, 1):
            work = (transport.isend if turn == transport.rank else transport.irecv)(message, 1 - transport.rank, _TAG)
            work.wait(_WAIT_SECONDS)
        elapsed.append((perf_counter() - start) / 2)
    return largest(transport, median(elapsed) if transport.rank == 0 else 0.0)


def _points(transport: Transport) -> Points:
    return [(float(nbytes), _many_messages(transport, nbytes)) for nbytes in SIZES]


def _many_messages(transport: Transport, nbytes: int) -> float:
    return seconds_per_message(transport, nbytes, max(_LEAST_MESSAGES, _ROUND_NBYTES // nbytes))


def seconds_per_message(transport: Transport, nbytes: int, count: int) -> float:
    """Return the time of a message among `count` that every rank sends to the next, a few in flight each way."""
    out, into = np.ones(nbytes, np.uint8), [np.ones(nbytes, np.uint8) for _ in range(WINDOW)]
    rounds = []
    for _ in range(_ROUNDS):
        _start_together(transport)
        start = perf_counter()
        _stream(transport, out, into, count)
        rounds.append(largest(transport, (perf_counter() - start) / count))
    return median(rounds)


def _stream(transport: Transport, out: np.ndarray, into: list[np.ndarray], count: int) -> None:
    after, before = (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size
    flying: deque[tuple[Work, Work]] = deque()
    for index in range(count):
        if len(flying) == WINDOW:
            _finish(flying.popleft())
        receiving = transport.irecv(into[index % WINDOW], before, _TAG)
        flying.append((receiving, transport.isend(out, after, _TAG)))
    while flying:
        _finish(flying.popleft())


def _finish(works: tuple[Work, Work]) -> None:
    for work in works:
        work.wait(_WAIT_SECONDS)


def _gamma(transport: Transport) -> float:
    """Return seconds per byte of summing, for blocks of the size pipelines use, on all ranks at once."""
    merge, left, right = merge_kernel("float32"), np.ones(1 << 16, np.float32), np.ones(1 << 16, np.float32)
    _start_together(transport)
    times = []
    for _ in range(50):
        start = perf_counter()
        merge(left, right)
        times.append(perf_counter() - start)
    return largest(transport, median(times)) / left.nbytes


def _start_together(transport: Transport) -> None:
    largest(transport, 0.0)
