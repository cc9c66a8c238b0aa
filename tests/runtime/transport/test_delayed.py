"""Messages arrive, in order, and later by the delay; several in flight pay it once."""

import time

import numpy as np
import pytest
from tests.runtime.threads import outcomes, run_ranks

from penstock.program import Collective
from penstock.runtime.communicator import Communicator
from penstock.runtime.transport.delayed import delayed
from penstock.runtime.transport.memory import Fabric

DELAY_SECONDS = 0.05


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def test_a_message_arrives_later_by_the_delay():
    def body(inner):
        with delayed(inner, DELAY_SECONDS) as transport:
            data = np.full(10, transport.rank, np.uint8)
            if transport.rank == 0:
                transport.isend(data, 1, tag=1).wait(10)
                return 0.0
            seconds = timed(lambda: transport.irecv(data, 0, tag=1).wait(10))
            assert data.sum() == 0
            return seconds

    assert DELAY_SECONDS * 0.9 < run_ranks(2, body)[1] < DELAY_SECONDS * 10


def test_ten_messages_in_flight_pay_the_delay_once_and_keep_their_order():
    def body(inner):
        with delayed(inner, DELAY_SECONDS) as transport:
            data = [np.full(4, index if transport.rank == 0 else 255, np.uint8) for index in range(10)]
            start = transport.isend if transport.rank == 0 else transport.irecv
            works = [start(view, 1 - transport.rank, 1) for view in data]
            seconds = timed(lambda: [work.wait(10) for work in works])
            assert [int(view[0]) for view in data] == list(range(10))
            return seconds

    assert max(run_ranks(2, body)) < 5 * DELAY_SECONDS


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_ring_over_a_long_wire_gives_the_same_sum_and_takes_a_delay_per_step(world_size):
    def body(inner):
        with delayed(inner, DELAY_SECONDS) as transport:
            communicator = Communicator(transport, timeout_seconds=10.0)
            communicator.all_reduce(np.zeros(12, np.float32), strategy="ring")  # compares programs, compiles kernels
            values = np.arange(12, dtype=np.float32) * (transport.rank + 1)
            seconds = timed(lambda: communicator.all_reduce(values, strategy="ring"))
            assert values.tolist() == (np.arange(12) * sum(range(world_size + 1))).tolist()
            return seconds

    assert min(run_ranks(world_size, body)) >= 2 * (world_size - 1) * DELAY_SECONDS * 0.9


def test_the_engines_own_collective_pays_at_least_log2_delays():
    def body(inner):
        with delayed(inner, DELAY_SECONDS) as transport:
            values = np.ones(3, np.float32)
            seconds = timed(lambda: transport.native(Collective.ALL_REDUCE, values, "float32", 0, 10))
            assert values.tolist() == [3, 3, 3]
            return seconds

    assert min(run_ranks(3, body)) >= 2 * DELAY_SECONDS * 0.9


def test_a_wait_that_ends_before_the_delay_times_out():
    def body(inner):
        with delayed(inner, 0.2) as transport:
            if transport.rank == 0:
                work = transport.isend(np.zeros(1, np.uint8), 1, 1)
                with pytest.raises(TimeoutError, match=r"nothing for 0\.01 s"):
                    work.wait(0.01)
            else:
                transport.irecv(np.zeros(1, np.uint8), 0, 1).wait(10)

    run_ranks(2, body)


def test_a_dead_peer_is_reported_as_without_delay():
    fabric = Fabric(2)
    fabric.kill(1)

    def body(inner):
        if inner.rank == 0:
            with delayed(inner, 0.01) as transport:
                transport.isend(np.zeros(1, np.uint8), 1, 1).wait(10)

    assert isinstance(outcomes(2, body, fabric)[0], ConnectionError)
