"""Many messages between ranks, by three deciders, on threads of one process: everything arrives, whoever decides."""

import threading

import numpy as np
import pytest

from bulk import Lanes, Online, run_at_will, run_steady
from bulk_schedule import Bulk, Message, plan_rounds
from penstock.errors import StrategyError
from penstock.network import LinearCost
from runtime.threads import run_ranks

BULK = Bulk(threshold_nbytes=3000, timeout_seconds=1e-3)


def exchange(world_size, count=12):
    return [
        Message(f"{i}:{source}>{target}", (100, 900, 2500)[(i + source) % 3], source, target, 1e-3 * i)
        for i in range(count)
        for source in range(world_size)
        for target in range(world_size)
        if source != target
    ]


def contents(message, rank):
    seed = [ord(letter) for letter in message.name]
    full = np.random.default_rng(seed).integers(0, 256, message.nbytes, dtype=np.uint8)
    return full if message.source == rank else np.zeros(message.nbytes, np.uint8)


def lanes_of(transport, table):
    memory = {m.name: contents(m, transport.rank) for m in table if transport.rank in m.link}
    return Lanes(transport, table, memory, timeout_seconds=120)


def check(lanes):
    for message in lanes.table:
        if message.target == lanes.transport.rank:
            assert np.array_equal(lanes.memory[message.name], contents(message, message.source)), message


def steady(lanes):
    schedule = plan_rounds(lanes.table, LinearCost(1e-4, 1e-8), BULK)
    for message in lanes.mine:
        lanes.post(message.name)
    run_steady(lanes, schedule)


def at_will(lanes):
    for message in lanes.mine:
        lanes.post(message.name)
    run_at_will(lanes)


def online(lanes):
    side = Online(lanes, BULK)
    posting = threading.Thread(target=lambda: [side.post(message.name) for message in lanes.mine])
    posting.start()
    side.run()
    posting.join()
    side.close()


@pytest.mark.parametrize("decide", [steady, at_will, online])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_everything_arrives_where_it_should_again_and_again(world_size, decide):
    table = exchange(world_size)

    def work(transport):
        lanes = lanes_of(transport, table)
        for _ in range(2):
            for message in table:
                if message.target == transport.rank:
                    lanes.memory[message.name][:] = 0
            lanes.begin()
            decide(lanes)
            check(lanes)
        lanes.close()

    before = set(threading.enumerate())
    run_ranks(world_size, work)
    assert set(threading.enumerate()) <= before


def test_a_message_that_is_never_posted_is_named():
    table = exchange(2, count=1)

    def work(transport):
        lanes = lanes_of(transport, table)
        lanes.timeout_seconds = 0.2
        try:
            run_steady(lanes, plan_rounds(table, LinearCost(1e-4, 1e-8), BULK))
        finally:
            lanes.close()

    with pytest.raises(TimeoutError, match="message '0:0>1' was never posted"):
        run_ranks(2, work)


def test_names_must_differ():
    twice = [Message("a", 1, 0, 1), Message("a", 1, 1, 0)]
    with pytest.raises(StrategyError, match="2 messages with 1 names; wanted a name for each"):
        run_ranks(1, lambda transport: Lanes(transport, twice, {}))
