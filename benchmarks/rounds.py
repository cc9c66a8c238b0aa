"""What a step of a collective costs on hosts that share one machine: messages at once, merges at once.

Alpha and beta are those of a link. Emulated hosts have links of their own, but share processors: the more messages
travel at once, the longer each takes, and so do merges. So both are measured as a program uses them, one after the
other and as many at once as its steps have (`SparseSteps.rounds`), and a prediction adds up what stands one after the
other. On a real cluster all counts would give the same.

A broadcast down a tree has a cost of its own on gloo: a send is finished when the kernel has taken it, long before it
has left, so a rank that sends to its children in turn sends to all of them at once, and the first, whose subtree is the
deepest, waits longest. That is measured too: how long the first of so many children waits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from penstock.bench.stream import seconds_per_message
from penstock.runtime.timed import WAIT_SECONDS, largest
from penstock.runtime.transport import Bytes, Transport
from penstock.strategies import find_strategy
from penstock.strategies.closed_form import Round, SparseSteps

_TAG, _BLOCKS, _TURNS = 1, 3, 6  # the median of so many blocks, of so many messages or merges each


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds of one message and of one merge, by how many there are at once."""

    messages: Mapping[int, float]
    merges: Mapping[int, float]
    first_children: Mapping[int, float]  # of the message to the first of so many children
    stream_seconds: float  # of a message in a stream on all NICs

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def seconds(self, strategy: str, hosts: int) -> tuple[float, float]:
        """Return what the messages of a sparse all-reduce take, and what its merges do."""
        steps = _steps(strategy, hosts)
        if steps.adds:  # every rank sends to all others, and waits for none of them
            return steps.messages * self.stream_seconds, 0.0
        rounds = steps.rounds
        messages = sum(self._message(each) for each in rounds)
        return messages, sum(self.merges[each.merges] for each in rounds if each.merges)

    def _message(self, one: Round) -> float:
        """Return what a step's messages take: the more at once or the more children, the longer."""
        alone = self.messages[one.messages]
        return max(alone, self.first_children[one.children]) if one.children else alone


def _steps(strategy: str, hosts: int) -> SparseSteps:
    steps = find_strategy(strategy).steps
    assert steps is not None, f"{strategy} is sparse"
    return steps(hosts)


def rounds_from(document: Mapping[str, Any]) -> Rounds:
    """Return what `Rounds.document` made; JSON has no numbers for keys."""
    names = ("messages", "merges", "first_children")
    messages, merges, children = ({int(n): t for n, t in document[name].items()} for name in names)
    return Rounds(messages, merges, children, document["stream_seconds"])


def measure_rounds(transport: Transport, strategies: Sequence[str], nbytes: int, merge: Callable[[], None]) -> Rounds:
    """Measure every count that the strategies have; all ranks must call this together and all get the same."""
    found = [each for strategy in strategies for each in _steps(strategy, transport.world_size).rounds]
    return Rounds(
        {count: _messages_at_once(transport, count, nbytes) for count in _counts(found, "messages")},
        {count: _merges_at_once(transport, count, merge) for count in _counts(found, "merges")},
        {count: _first_child(transport, count, nbytes) for count in _counts(found, "children")},
        seconds_per_message(transport, nbytes, transport.world_size - 1),
    )


def _counts(rounds: Sequence[Round], kind: str) -> list[int]:
    return sorted({getattr(each, kind) for each in rounds} - {0})


def _messages_at_once(transport: Transport, count: int, nbytes: int) -> float:
    """Return the seconds of a message among `count`: pairs of ranks send in turn, or both ways where there are more."""
    both_ways = count > transport.world_size // 2
    pairs = count // 2 if both_ways else count
    active = transport.rank < 2 * pairs
    out, into = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

    def one(turn: int) -> None:
        _exchange(transport, out, into, both_ways, turn)

    return _agreed(transport, one if active else None)


def _exchange(transport: Transport, out: Bytes, into: Bytes, both_ways: bool, turn: int) -> None:
    """Receive first, as the executor does: gloo takes twice as long both ways where a send comes before its receive."""
    peer, works = transport.rank ^ 1, []
    if both_ways or (transport.rank + turn) % 2 == 0:
        works.append(transport.irecv(into, peer, _TAG))
    if both_ways or (transport.rank + turn) % 2:
        works.append(transport.isend(out, peer, _TAG))
    for work in works:
        work.wait(WAIT_SECONDS)


def _first_child(transport: Transport, children: int, nbytes: int) -> float:
    """Return how long the first child waits where rank 0 sends to it, and then in turn to the others, as trees do.

    Connections are not alike: one that is used more has more in flight, and gets more of the NIC. So these are the
    very ones of the tree, deepest subtree first.
    """
    targets = [1 << level for level in reversed(range(children))]
    message, waited = np.ones(nbytes, np.uint8), []
    for _ in range(_TURNS):
        largest(transport, 0.0)  # start together
        start = perf_counter()
        if transport.rank in targets:
            transport.irecv(message, 0, _TAG).wait(WAIT_SECONDS)
        for child in targets if transport.rank == 0 else ():
            transport.isend(message, child, _TAG).wait(WAIT_SECONDS)
        waited.append(perf_counter() - start)
    return largest(transport, median(waited) if transport.rank == targets[0] else 0.0)


def _merges_at_once(transport: Transport, count: int, merge: Callable[[], None]) -> float:
    return _agreed(transport, (lambda _: merge()) if transport.rank < count else None)


def _agreed(transport: Transport, one: Callable[[int], None] | None) -> float:
    """Return the slowest rank's seconds for one turn; ranks without anything to do only wait."""
    blocks = []
    for _ in range(_BLOCKS):
        largest(transport, 0.0)  # start together
        start = perf_counter()
        for turn in range(_TURNS if one else 0):
            assert one is not None
            one(turn)
        blocks.append(largest(transport, (perf_counter() - start) / _TURNS))
    return median(blocks)
