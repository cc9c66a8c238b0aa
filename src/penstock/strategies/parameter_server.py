"""Parameter server: ranks push their parts of a partition to its aggregator and pull the sum (HiPress, CaSync-PS).

The data is cut into K partitions; partition k belongs to aggregator k modulo their number. Aggregators are all ranks
(co-located, 2(N-1) transfers each) or only the last S (`servers`). Aggregators are ranks of the collective and
contribute too; one that is only a server contributes zeros.

    all-reduce of partitions a b c on 3 ranks, co-located: rank 0 owns a, 1 owns b, 2 owns c

    step 1   0 -> 1: b0   1 -> 2: c1   2 -> 0: a2      push to the next rank
    step 2   0 -> 2: c0   1 -> 0: a1   2 -> 1: b2      push to the one after
    step 3   0 -> 1: A    1 -> 2: B    2 -> 0: C       pull, in the same order
    step 4   0 -> 2: A    1 -> 0: B    2 -> 1: C

In step s every rank sends to the rank s further on, so no two messages meet on a link; a rank sends one at a time.
With K = N each rank sends and receives 2(N-1)/N n bytes, as in a ring, in as many steps, but a sum passes two links
and not 2(N-1). With K = 1 one rank does all the work: (N-1) n bytes each way. Partitions beyond one per aggregator
come in waves. Each partition is summed by one rank in one order, so all ranks end with the same bits.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import StrategyError
from penstock.program import DATA, Collective, Program, Slice, split
from penstock.program.builder import ProgramBuilder
from penstock.strategies.options import Options
from penstock.strategies.pipeline import DEPTH, Arrival, Departure, declare_inbox, emit

NAME = "parameter_server"


@dataclass(frozen=True, slots=True)
class _Message:
    when: tuple[int, int]  # (turn, round): all ranks keep to this order
    source: int
    target: int
    part: Slice
    push: bool  # merged by the target; otherwise the finished sum


def all_reduce(world_size: int, numel: int, options: Options) -> Program:
    """Sum each partition on its aggregator and send the sum back; a partition is never cut further."""
    builder = ProgramBuilder(NAME, Collective.ALL_REDUCE, world_size, numel)
    owners = aggregators(world_size, options.servers)
    parts = [Slice(DATA, start, stop) for start, stop in split(numel, options.partitions or len(owners))]
    largest = max(part.numel for part in parts)
    coming: list[list[_Message]] = [[] for _ in range(world_size)]
    going: list[list[_Message]] = [[] for _ in range(world_size)]
    for message in sorted(_messages(world_size, parts, owners), key=lambda one: one.when):
        coming[message.target].append(message)
        going[message.source].append(message)
    if world_size > 1:
        declare_inbox(builder, largest)
    for rank in range(world_size):
        arrivals = [Arrival(one.source, one.part, merged=one.push) for one in coming[rank]]
        emit(builder, rank, arrivals, _departures(coming[rank], going[rank]), largest, in_turn=True)
    return builder.build()


def aggregators(world_size: int, servers: int | None) -> range:
    """Return the ranks that aggregate."""
    if servers is not None and servers > world_size:
        raise StrategyError(f"{NAME}: {servers} servers of {world_size} ranks; wanted at most {world_size}")
    return range(world_size - (servers or world_size), world_size)


def _messages(world_size: int, parts: list[Slice], owners: range) -> Iterator[_Message]:
    """Yield every push and pull; in a wave each aggregator has one partition, and it is pulled after the next push."""
    for index, part in enumerate(parts):
        if not part.numel:
            continue
        wave, owner = index // len(owners), owners[index % len(owners)]
        for step in range(1, world_size):
            yield _Message((2 * wave, step), (owner - step) % world_size, owner, part, push=True)
            yield _Message((2 * wave + 3, step), owner, (owner + step) % world_size, part, push=False)


def _departures(coming: list[_Message], going: list[_Message]) -> list[Departure]:
    """Let each message leave after what it needs, and not far ahead of what the rank is to receive before it.

    Without that limit all ranks could fill their send queues before any of them receives.
    """
    last_push = {one.part: index for index, one in enumerate(coming) if one.push}
    times = [one.when for one in coming]
    departures = []
    for one in going:
        needed = -1 if one.push else last_push[one.part]
        departures.append(Departure(one.target, one.part, max(needed, bisect_left(times, one.when) - 1 - DEPTH)))
    return departures
