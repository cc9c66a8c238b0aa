"""Who sends what to whom next: bulk communication, coordinated over all ranks (HiPress section 3.2).

Every rank tells which messages it has for whom. Messages of one link wait in one queue. In each round the coordinator
picks links of which no two share a sender or a receiver, so that each NIC sends to one rank and receives from one rank
at a time, and batches what waits on each of them. A link is due when it holds `threshold_nbytes`, or when its oldest
message has waited for `timeout_seconds`, whichever comes first.

    waiting:  a, b: 0 -> 1    c: 0 -> 2    d: 2 -> 1    e: 1 -> 2
    round 1:  0 -> 1: a b     1 -> 2: e       2 -> 1 would meet a and b at rank 1
    round 2:  0 -> 2: c       2 -> 1: d

Everything here is a function of its arguments: rank 0 calls it online (`bulk.Online`), or the schedule of a steady
iteration is computed once and replayed (`bulk.py`). `coordinator.py` compares them; training uses neither.

The link whose first message is oldest among those that are due goes first; while its sender or its receiver is busy,
the other one is kept free for it. So a message that is due waits for no more batches than there are messages before it.
The other links of a round are as many as can be: a largest matching of the senders and receivers that are left.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import StrategyError
from penstock.network import LinearCost

Link = tuple[int, int]  # sender, receiver


@dataclass(frozen=True, slots=True)
class Message:
    """Something a rank has for another."""

    name: str
    nbytes: int  # on the wire
    source: int
    target: int
    ready_seconds: float = 0.0  # when it can be sent at the earliest

    @property
    def link(self) -> Link:
        """The link it travels."""
        return self.source, self.target


@dataclass(frozen=True, slots=True)
class Bulk:
    """When a link is due and how much it sends at once."""

    threshold_nbytes: int = 1 << 20
    timeout_seconds: float = 1e-3

    def __post_init__(self) -> None:
        if self.threshold_nbytes < 1 or not self.timeout_seconds >= 0:
            found = f"threshold of {self.threshold_nbytes} bytes, timeout of {self.timeout_seconds} s"
            raise StrategyError(f"bulk communication: {found}; wanted at least 1 byte and 0 s")


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of one link that travel as one."""

    messages: tuple[Message, ...]

    @property
    def link(self) -> Link:
        """The link it travels."""
        return self.messages[0].link

    @property
    def nbytes(self) -> int:
        """Of all its messages."""
        return sum(message.nbytes for message in self.messages)


@dataclass(frozen=True, slots=True)
class Sending:
    """A batch and when it travels."""

    batch: Batch
    start_seconds: float
    end_seconds: float


def choose_round(
    waiting: Iterable[Message],
    now_seconds: float,
    bulk: Bulk,
    busy_senders: Collection[int] = (),
    busy_receivers: Collection[int] = (),
) -> tuple[Batch, ...]:
    """Return the batches to send now, on links that do not meet; none where no link is due.

    `waiting` is in the order in which messages are to leave; those of one link keep it.
    """
    queues = _queues(waiting)
    due = [link for link, queue in queues.items() if _is_due(queue, now_seconds, bulk)]
    due.sort(key=lambda link: queues[link][0].ready_seconds)
    if not due:
        return ()
    oldest, *others = due
    free = [link for link in others if link[0] not in busy_senders and link[1] not in busy_receivers]
    chosen = _matching([link for link in free if link[0] != oldest[0] and link[1] != oldest[1]])
    if oldest[0] not in busy_senders and oldest[1] not in busy_receivers:
        chosen = [oldest, *chosen]
    return tuple(_batch(queues[link], bulk) for link in chosen)


def plan_rounds(messages: Sequence[Message], cost: LinearCost, bulk: Bulk) -> list[Sending]:
    """Return when everything travels, offline: idle NICs are given work as soon as some is due.

    A batch of n bytes holds its sender and its receiver for `cost.seconds(n)`.
    """
    left = sorted(messages, key=lambda message: message.ready_seconds)
    sent: list[Sending] = []
    now = 0.0
    while left:
        running = [each for each in sent if each.end_seconds > now]
        waiting = [message for message in left if message.ready_seconds <= now]
        senders, receivers = {each.batch.link[0] for each in running}, {each.batch.link[1] for each in running}
        chosen = choose_round(waiting, now, bulk, senders, receivers)
        sent += [Sending(batch, now, now + cost.seconds(batch.nbytes)) for batch in chosen]
        gone = {id(message) for batch in chosen for message in batch.messages}
        left = [message for message in left if id(message) not in gone]
        if left:
            now = _next_event(now, left, sent, bulk)
    return sent


def _queues(waiting: Iterable[Message]) -> dict[Link, list[Message]]:
    queues: dict[Link, list[Message]] = {}
    for message in waiting:
        if message.source == message.target:
            raise StrategyError(f"message {message.name!r} is from rank {message.source} to itself; nothing to send")
        queues.setdefault(message.link, []).append(message)
    return queues


def _is_due(queue: Sequence[Message], now_seconds: float, bulk: Bulk) -> bool:
    full = sum(message.nbytes for message in queue) >= bulk.threshold_nbytes
    return full or now_seconds >= queue[0].ready_seconds + bulk.timeout_seconds


def _batch(queue: Sequence[Message], bulk: Bulk) -> Batch:
    """Take messages from the front up to the threshold, and the first whatever its size: batches are alike in size."""
    taken, nbytes = [queue[0]], queue[0].nbytes
    for message in queue[1:]:
        if nbytes + message.nbytes > bulk.threshold_nbytes:
            break
        taken.append(message)
        nbytes += message.nbytes
    return Batch(tuple(taken))


def _matching(links: Sequence[Link]) -> list[Link]:
    """Return as many of the links as can be without two that share a sender or a receiver."""
    targets: dict[int, list[int]] = {}
    for source, target in links:
        targets.setdefault(source, []).append(target)
    sender_of: dict[int, int] = {}
    for source in targets:
        _augment(source, targets, sender_of, set())
    return [(source, target) for source, target in links if sender_of.get(target) == source]


def _augment(source: int, targets: Mapping[int, list[int]], sender_of: dict[int, int], seen: set[int]) -> bool:
    """Find a receiver for `source`, moving other senders to other receivers where that helps (Kuhn's algorithm)."""
    for target in targets[source]:
        if target not in seen:
            seen.add(target)
            if target not in sender_of or _augment(sender_of[target], targets, sender_of, seen):
                sender_of[target] = source
                return True
    return False


def _next_event(now: float, left: Sequence[Message], sent: Sequence[Sending], bulk: Bulk) -> float:
    """Return when something changes: a message is ready, a link is due by its timeout, or a NIC is free again."""
    ready = [message.ready_seconds for message in left]
    due = [message.ready_seconds + bulk.timeout_seconds for message in left]
    ends = [each.end_seconds for each in sent]
    return min(moment for moment in (*ready, *due, *ends) if moment > now)
