"""Bulk communication on a real engine: many messages between ranks, batched and in an order that keeps links apart.

Only `penstock bench coordinator` uses it: training exchanges its buckets one after the other.

A `Lanes` moves batches: one thread sends, one receives, so that each NIC does one of each at a time. Who decides the
order stands apart:

- `run_steady` replays a schedule that was computed once (`coordinator.plan_rounds`), since training repeats;
- `online.Online.run` asks rank 0, who decides while messages become ready;
- `run_at_will` sends every message as soon as it is ready, which is what both are compared with.

All ranks hold the same table of messages. `post` says that one of this rank's messages may leave.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import numpy as np

from penstock.errors import StrategyError
from penstock.runtime.coordinator import Batch, Message, Sending
from penstock.runtime.transport import Bytes, Transport, Work

TIMEOUT_SECONDS = 60.0
FIRST_TAG = 2  # of data; one tag for each message that a batch may begin with
MOST_MESSAGES = 16_000  # tags end somewhere


class Lanes:
    """One rank's memory for the messages of a table, and the two threads that move them."""

    def __init__(
        self,
        transport: Transport,
        table: Sequence[Message],
        memory: Mapping[str, Bytes],  # of every message this rank sends or receives, by name
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.transport, self.table, self.memory = transport, tuple(table), memory
        self.timeout_seconds = timeout_seconds
        self.number = {message.name: index for index, message in enumerate(self.table)}
        if len(self.number) < len(self.table) or len(self.table) > MOST_MESSAGES:
            found = f"{len(self.table)} messages with {len(self.number)} names"
            raise StrategyError(f"bulk communication: {found}; wanted a name for each, and at most {MOST_MESSAGES}")
        self.mine = [message for message in self.table if message.source == transport.rank]
        self.ready = {message.name: Event() for message in self.mine}
        self.sender = ThreadPoolExecutor(1, "penstock-bulk-send")
        self.receiver = ThreadPoolExecutor(1, "penstock-bulk-receive")

    def post(self, name: str) -> None:
        """Say that a message may leave."""
        self.ready[name].set()

    def begin(self) -> None:
        """Forget what was posted: the next iteration starts."""
        for event in self.ready.values():
            event.clear()

    def close(self) -> None:
        """End the threads."""
        self.sender.shutdown()
        self.receiver.shutdown()

    def send(self, batch: Batch) -> None:
        """Send a batch as one message, once all of it has been posted; return when its memory may be used again."""
        for message in batch.messages:
            if not self.ready[message.name].wait(self.timeout_seconds):
                raise TimeoutError(f"message {message.name!r} was never posted")
        self._start(batch).wait(self.timeout_seconds)

    def receive(self, batch: Batch) -> None:
        """Receive a batch and put its messages where they belong."""
        parts = [self.memory[message.name] for message in batch.messages]
        packed = parts[0] if len(parts) == 1 else np.empty(batch.nbytes, np.uint8)
        self.transport.irecv(packed, batch.link[0], self.tag(batch)).wait(self.timeout_seconds)
        start = 0
        for part in parts if len(parts) > 1 else ():
            part[:] = packed[start : start + part.size]
            start += part.size

    def tag(self, batch: Batch) -> int:
        """Return the tag that both sides of a batch use."""
        return FIRST_TAG + self.number[batch.messages[0].name]

    def _start(self, batch: Batch) -> Work:
        parts = [self.memory[message.name] for message in batch.messages]
        packed = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return self.transport.isend(packed, batch.link[1], self.tag(batch))


def run_steady(lanes: Lanes, schedule: Sequence[Sending]) -> None:
    """Carry out a schedule that all ranks computed alike; returns when this rank's part is done.

    It cannot deadlock: every rank takes its sends in the schedule's order, and its receives, so of all batches that are
    not finished the first one has nothing before it on either side.
    """
    rank = lanes.transport.rank
    mine = [each.batch for each in schedule if rank in each.batch.link]
    wait_for(
        [lanes.sender.submit(lanes.send, batch) for batch in mine if batch.link[0] == rank],
        [lanes.receiver.submit(lanes.receive, batch) for batch in mine if batch.link[1] == rank],
    )


def run_at_will(lanes: Lanes) -> None:
    """Send each message as soon as it is posted, to whomever; receive from everybody at once."""
    rank = lanes.transport.rank
    coming = [message for message in lanes.table if message.target == rank]
    works = [
        lanes.transport.irecv(lanes.memory[message.name], message.source, lanes.tag(Batch((message,))))
        for message in coming
    ]
    wait_for([lanes.sender.submit(_send_all, lanes)])
    for work in works:
        work.wait(lanes.timeout_seconds)


def _send_all(lanes: Lanes) -> None:
    """Start the rank's sends in their order without waiting for one another."""
    started: list[Work] = []
    for message in lanes.mine:
        if not lanes.ready[message.name].wait(lanes.timeout_seconds):
            raise TimeoutError(f"message {message.name!r} was never posted")
        started.append(lanes._start(Batch((message,))))
    for work in started:
        work.wait(lanes.timeout_seconds)


def wait_for(*groups: Sequence["Future[None]"]) -> None:
    """Wait for all of them; raise what the first failing one raised."""
    for group in groups:
        for future in group:
            future.result()
