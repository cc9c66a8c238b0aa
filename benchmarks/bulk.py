"""Bulk communication on a real engine: many messages between ranks, batched and in an order that keeps links apart.

Only `coordinator.py` uses it: training has its buckets in lanes, and small ones in bulks. A `Lanes` moves batches: one
thread sends, one receives, so that each NIC does one of each at a time. Who decides the order stands apart:

- `run_steady` replays a schedule that was computed once (`bulk_schedule.plan_rounds`), since training repeats;
- `Online.run` asks rank 0, which decides while messages become ready;
- `run_at_will` sends every message as soon as it is ready, which is what both are compared with.

All ranks hold the same table of messages. `post` says that one of this rank's messages may leave.

Online, rank 0 hears what is ready, decides who sends to whom, and tells them, beside the data:

    every rank -> 0    ready i j ..  these messages of the table may leave
    0 -> sender        send i j ..   these messages, as one batch
    0 -> receiver      receive i j ..
    receiver -> 0      done i        the batch that begins with i has arrived: both NICs are free again
    0 -> every rank    stop          everything has arrived
    every rank -> 0    bye           nothing more will come

Notes have a fixed size, so that both sides of an engine know what to expect; they are small beside the data and have a
tag of their own. A rank tells what is ready twice in a link's timeout, not message by message. Rank 0 listens to each
rank on a thread of its own: gloo cannot be asked whether a message has come.
"""

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Lock
from time import perf_counter, sleep

import numpy as np
from numpy.typing import NDArray

from bulk_schedule import Batch, Bulk, Message, Sending, choose_round
from penstock.errors import StrategyError
from penstock.runtime.transport import LAST_TAG, Bytes, Transport, Work

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
    """Send each message as soon as it is posted, to any rank; receive from all at once."""
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


TAG = LAST_TAG - 1
MOST = 62  # messages of a batch that a note can name
READY, DONE, SEND, RECEIVE, STOP, BYE = range(6)
Note = NDArray[np.int64]  # kind, count, numbers of messages


class Online:
    """One rank's side of coordinated exchanges; rank 0's also coordinates. Threads last until `close`."""

    def __init__(self, lanes: Lanes, bulk: Bulk) -> None:
        self.lanes, self.bulk = lanes, bulk
        self._lock = Lock()  # notes of several threads must not mix on one link
        self._told: queue.SimpleQueue[Note] = queue.SimpleQueue()  # rank 0: notes to itself, as a rank
        self._heard: queue.SimpleQueue[tuple[int, Note]] = queue.SimpleQueue()  # rank 0: notes of all ranks
        self._posted: queue.SimpleQueue[int] = queue.SimpleQueue()  # numbers of messages not announced yet
        self._threads = ThreadPoolExecutor(lanes.transport.world_size + 1, "penstock-coordinator")

    def close(self) -> None:
        """End the threads; the lanes are the caller's."""
        self._threads.shutdown()

    def post(self, name: str) -> None:
        """Say that a message may leave, to the lanes and soon to rank 0."""
        self.lanes.post(name)
        self._posted.put(self.lanes.number[name])

    def run(self) -> None:
        """Send and receive as rank 0 says until everything has arrived; messages are posted meanwhile."""
        coordinating = [*self._start_coordinating(), self._threads.submit(self._announce)]
        moving: list[Future[None]] = []
        while (note := self._next_note())[0] != STOP:
            batch = self._batch(note)
            if note[0] == SEND:
                moving.append(self.lanes.sender.submit(self.lanes.send, batch))
            else:
                moving.append(self.lanes.receiver.submit(self._receive, batch))
        wait_for(moving)
        self._tell(0, BYE, [], to_coordinator=True)
        wait_for(coordinating)

    # A rank's side

    def _announce(self) -> None:
        """Tell rank 0 what was posted, a few messages at a time, until all of this rank's are."""
        left = len(self.lanes.mine)
        while left:
            try:
                numbers = [self._posted.get(timeout=self.lanes.timeout_seconds)]
            except queue.Empty:
                raise TimeoutError(f"{left} of this rank's messages were never posted") from None
            sleep(self.bulk.timeout_seconds / 2)
            while not self._posted.empty() and len(numbers) < MOST:
                numbers.append(self._posted.get())
            self._tell(0, READY, numbers, to_coordinator=True)
            left -= len(numbers)

    def _receive(self, batch: Batch) -> None:
        self.lanes.receive(batch)
        self._tell(0, DONE, [self.lanes.number[batch.messages[0].name]], to_coordinator=True)

    def _next_note(self) -> Note:
        if self.lanes.transport.rank:
            return self._hear(0)
        try:
            return self._told.get(timeout=self.lanes.timeout_seconds)
        except queue.Empty:
            seconds = self.lanes.timeout_seconds
            raise TimeoutError(f"nothing was decided for {seconds:g} s: some rank posted nothing") from None

    def _hear(self, peer: int) -> Note:
        note = np.zeros(2 + MOST, np.int64)
        self.lanes.transport.irecv(note.view(np.uint8), peer, TAG).wait(self.lanes.timeout_seconds)
        return note

    def _batch(self, note: Note) -> Batch:
        return Batch(tuple(self.lanes.table[number] for number in note[2 : 2 + note[1]]))

    def _tell(self, peer: int, kind: int, numbers: list[int], to_coordinator: bool = False) -> None:
        note = np.zeros(2 + MOST, np.int64)
        note[:2] = kind, len(numbers)
        note[2 : 2 + len(numbers)] = numbers
        if peer != self.lanes.transport.rank:
            with self._lock:
                self.lanes.transport.isend(note.view(np.uint8), peer, TAG).wait(self.lanes.timeout_seconds)
        elif to_coordinator:
            self._heard.put((0, note))
        else:
            self._told.put(note)

    # Rank 0's side

    def _start_coordinating(self) -> list["Future[None]"]:
        transport = self.lanes.transport
        if transport.rank:
            return []
        listening = [self._threads.submit(self._listen, peer) for peer in range(1, transport.world_size)]
        return [self._threads.submit(self._coordinate), *listening]

    def _listen(self, peer: int) -> None:
        while True:
            note = self._hear(peer)
            self._heard.put((peer, note))
            if note[0] == BYE:
                return

    def _coordinate(self) -> None:
        waiting: list[Message] = []
        moving: dict[int, Batch] = {}  # by the number of its first message
        left, start = len(self.lanes.table), perf_counter()
        while left:
            for note in self._news():
                now = perf_counter() - start
                if note[0] == READY:
                    waiting += [replace(self.lanes.table[i], ready_seconds=now) for i in note[2 : 2 + note[1]]]
                elif note[0] == DONE:
                    left -= len(moving.pop(int(note[2])).messages)
            chosen = self._decide(waiting, moving, perf_counter() - start)
            moving |= {self.lanes.number[batch.messages[0].name]: batch for batch in chosen}
            gone = {message.name for batch in chosen for message in batch.messages}
            waiting = [message for message in waiting if message.name not in gone]
        for peer in range(self.lanes.transport.world_size):
            self._tell(peer, STOP, [])

    def _news(self) -> list[Note]:
        """Return all notes that have come; wait for one, but no longer than a link may have to."""
        try:
            found = [self._heard.get(timeout=max(self.bulk.timeout_seconds, 1e-4))[1]]
        except queue.Empty:
            return []
        while not self._heard.empty():
            found.append(self._heard.get()[1])
        return found

    def _decide(self, waiting: list[Message], moving: dict[int, Batch], now: float) -> list[Batch]:
        senders, receivers = ({batch.link[side] for batch in moving.values()} for side in (0, 1))
        chosen = [Batch(batch.messages[:MOST]) for batch in choose_round(waiting, now, self.bulk, senders, receivers)]
        for batch in chosen:
            numbers = [self.lanes.number[message.name] for message in batch.messages]
            self._tell(batch.link[1], RECEIVE, numbers)
            self._tell(batch.link[0], SEND, numbers)
        return chosen
