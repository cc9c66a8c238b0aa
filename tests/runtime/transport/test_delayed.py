"""Messages arrive, in order, and later by the delay; several in flight pay it once."""

import threading
import time

import numpy as np
import pytest
from tests.runtime.threads import outcomes, run_ranks

from penstock.program import Collective
from penstock.runtime.communicator import Communicator
from penstock.runtime.transport.delayed import delayed
from penstock.runtime.transport.memory import Fabric

DELAY_SECONDS = 0.05


class Clock:
    """A clock that only sleeping moves, and nobody sleeps before the test lets them."""

    def __init__(self):
        self.now, self.moves = 0.0, threading.Event()

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert self.moves.wait(60)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("penstock.runtime.transport.delayed.time", clock)
    return clock


def test_a_message_arrives_later_by_the_delay(clock):
    def body(inner):
        with delayed(inner, DELAY_SECONDS) as transport:
            data = np.full(10, transport.rank, np.uint8)
            if transport.rank == 0:
                work = transport.isend(data, 1, tag=1)
                clock.moves.set()
                work.wait(60)
            else:
                transport.irecv(data, 0, tag=1).wait(60)
            assert data.sum() == 0

    run_ranks(2, body)
    assert clock.now == DELAY_SECONDS


def test_ten_messages_in_flight_pay_the_delay_once_and_keep_their_order(clock):
    def body(inner):
        with delayed(inner, DELAY_SECONDS) as transport:
            data = [np.full(4, index if transport.rank == 0 else 255, np.uint8) for index in range(10)]
            start = transport.isend if transport.rank == 0 else transport.irecv
            works = [start(view, 1 - transport.rank, 1) for view in data]
            if transport.rank == 0:
                clock.moves.set()
            for work in works:
                work.wait(60)
            assert [int(view[0]) for view in data] == list(range(10))

    run_ranks(2, body)
    assert clock.now == DELAY_SECONDS


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_ring_over_a_long_wire_gives_the_same_sum_and_takes_a_delay_per_step(world_size):
    def body(inner):
        with delayed(inner, DELAY_SECONDS) as transport:
            communicator = Communicator(transport)
            communicator.all_reduce(np.zeros(12, np.float32), strategy="ring")  # compares programs, compiles kernels
            values = np.arange(12, dtype=np.float32) * (transport.rank + 1)
            started = time.monotonic()
            communicator.all_reduce(values, strategy="ring")
            assert values.tolist() == (np.arange(12) * sum(range(world_size + 1))).tolist()
            return started, time.monotonic()

    started, ended = zip(*run_ranks(world_size, body), strict=True)
    # The chunk that the last rank to start sends first makes all the hops of a ring after that.
    assert max(ended) - max(started) >= 2 * (world_size - 1) * DELAY_SECONDS * 0.99


def test_the_engines_own_collective_pays_at_least_log2_delays():
    def body(inner):
        with delayed(inner, DELAY_SECONDS) as transport:
            values, started = np.ones(3, np.float32), time.monotonic()
            transport.native(Collective.ALL_REDUCE, values, "float32", 0, 60)
            assert values.tolist() == [3, 3, 3]
            return time.monotonic() - started

    assert min(run_ranks(3, body)) >= 2 * DELAY_SECONDS * 0.99


def test_a_wait_that_ends_before_the_delay_times_out(clock):
    def body(inner):
        with delayed(inner, 0.2) as transport:
            if transport.rank == 0:
                work = transport.isend(np.zeros(1, np.uint8), 1, 1)
                with pytest.raises(TimeoutError, match=r"nothing for 0\.01 s"):
                    work.wait(0.01)
                clock.moves.set()
            else:
                transport.irecv(np.zeros(1, np.uint8), 0, 1).wait(60)

    run_ranks(2, body)


def test_a_dead_peer_is_reported_as_without_delay():
    fabric = Fabric(2)
    fabric.kill(1)

    def body(inner):
        if inner.rank == 0:
            with delayed(inner, 0.01) as transport:
                transport.isend(np.zeros(1, np.uint8), 1, 1).wait(60)

    assert isinstance(outcomes(2, body, fabric)[0], ConnectionError)
