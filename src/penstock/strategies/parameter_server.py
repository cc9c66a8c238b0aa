"""Parameter server: ranks push their parts of a partition to its aggregator and pull the sum (HiPress, CaSync-PS).

The data is cut into K partitions; partition k belongs to aggregator k modulo their number. Aggregators are all ranks
(co-located, 2(N-1) transfers each) or only the last S (`servers`). Aggregators are ranks of the collective and
contribute too. With `dedicated` they do not: what they hold counts as zeros, so that W = N - S workers push to them and
pull from them, and no server sends to another; a server ends with the sums of its own partitions.

    servers=2, dedicated: partitions a b on 2 workers, ranks 2 and 3 aggregate

    step 1   0 -> 2: a0   1 -> 3: b1      push
    step 2   0 -> 3: b0   1 -> 2: a1
    step 3   2 -> 0: A    3 -> 1: B       pull
    step 4   2 -> 1: A    3 -> 0: B

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
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from penstock.errors import StrategyError
from penstock.network import LinearCost, Network
from penstock.program import DATA, Collective, Part, Slice, split
from penstock.program.builder import PartBuilder
from penstock.strategies.closed_form import SyncCounts, constants
from penstock.strategies.compress import compressed
from penstock.strategies.pipeline import DEPTH, Arrival, Departure, declare_inbox, emit
from penstock.strategies.strategy import DEFAULT, Cut, Options, Strategy

NAME = "parameter_server"


class _Message(NamedTuple):
    """A message that this rank sends or receives."""

    turn: int  # all ranks keep to the order of turn and step
    step: int
    peer: int
    part: Slice
    push: bool  # merged by the aggregator; otherwise the finished sum


def all_reduce(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum each partition on its aggregator and send the sum back; a partition is never cut further."""
    builder = PartBuilder(NAME, Collective.ALL_REDUCE, rank, world_size, numel)
    owners = aggregators(world_size, options.servers, options.dedicated)
    workers = world_size - len(owners) if options.dedicated else world_size
    parts = [Slice(DATA, start, stop) for start, stop in split(numel, options.partitions or len(owners))]
    builder.units = [part for part in parts if part.numel]
    largest = max(part.numel for part in parts)
    coming, going = _messages(rank, world_size, parts, owners, workers)
    if world_size > 1:
        declare_inbox(builder, largest)
    arrivals = [Arrival(one.peer, one.part, one.push) for one in coming]
    emit(builder, arrivals, _departures(coming, going), largest, in_turn=True)
    return replace(builder.build(), servers=world_size - workers)


def aggregators(world_size: int, servers: int | None, dedicated: bool = False) -> range:
    """Return the ranks that aggregate."""
    most = world_size - 1 if dedicated else world_size
    if servers is not None and servers > most:
        kind = "dedicated servers" if dedicated else "servers"
        raise StrategyError(f"{NAME}: {servers} {kind} of {world_size} ranks; wanted at most {most}")
    return range(world_size - (servers or world_size), world_size)


def _messages(
    rank: int, world_size: int, parts: list[Slice], owners: range, workers: int
) -> tuple[list[_Message], list[_Message]]:
    """Return what a rank receives and what it sends, in order; only the first `workers` ranks push and pull.

    In a wave each aggregator has one partition, and it is pulled after the push of the next wave. Steps turn around a
    circle of all ranks, or of dedicated servers beside as many workers: no rank is in two messages of one step.
    """
    turns, shift = (world_size, 0) if workers == world_size else (max(workers, len(owners)), workers)
    coming: list[_Message] = []
    going: list[_Message] = []
    for index, part in enumerate(parts):
        if part.start == part.stop:
            continue
        wave, owner = index // len(owners), owners[index % len(owners)]
        push, pull, place = 2 * wave, 2 * wave + 3, owner - shift
        if owner == rank:
            peers = [peer for peer in range(workers) if peer != owner]
            coming += [_Message(push, (place - peer) % turns, peer, part, True) for peer in peers]
            going += [_Message(pull, (peer - place) % turns, peer, part, False) for peer in peers]
        elif rank < workers:
            going.append(_Message(push, (place - rank) % turns, owner, part, True))
            coming.append(_Message(pull, (rank - place) % turns, owner, part, False))
    for messages in (coming, going):
        messages.sort(key=lambda one: one[:2])
    return coming, going


def _departures(coming: list[_Message], going: list[_Message]) -> list[Departure]:
    """Let each message leave after what it needs, and not far ahead of what the rank is to receive before it.

    Without that limit all ranks could fill their send queues before any of them receives.
    """
    last_push = {one.part: index for index, one in enumerate(coming) if one.push}
    times = [one[:2] for one in coming]
    departures = []
    for one in going:
        needed = -1 if one.push else last_push[one.part]
        after = max(needed, bisect_left(times, one[:2]) - 1 - DEPTH)
        departures.append(Departure(one.peer, one.part, after, finished=not one.push))
    return departures


def stages(network: Network, p: int, options: Options = DEFAULT) -> Mapping[str, LinearCost]:
    """Push and pull, which overlap those of other buckets, as two lines (MG-WFBP section 4.3).

    Each of S servers sums an S-th part, which it receives from all other ranks, one after the other; from a dedicated
    one only those that train push and pull.
    """
    alpha, beta, gamma = constants(network)
    servers = len(aggregators(p, options.servers, options.dedicated))
    messages, share = p - (servers if options.dedicated else 1), 1 / servers
    push = LinearCost(messages * alpha, messages * share * (beta + gamma))
    return {"push": push, "pull": LinearCost(messages * alpha, messages * share * beta)}


def cost(network: Network, p: int, options: Options = DEFAULT) -> LinearCost:
    """Return push and pull, one after the other, as one line."""
    push, pull = stages(network, p, options).values()
    return push + pull


def counts(workers: int, pieces: int) -> SyncCounts:
    """CaSync-PS with aggregators on the workers, as HiPress section 6 ran it (erratum 7).

    Every rank encodes all pieces; an aggregator decodes N of each of its own.
    """
    return SyncCounts(2 * (workers - 1), pieces, workers)


PARAMETER_SERVER = Strategy(
    NAME,
    {Collective.ALL_REDUCE: all_reduce},
    coded=compressed(all_reduce),
    options=("servers", "dedicated"),
    cut=lambda world_size, options: Cut(len(aggregators(world_size, options.servers, options.dedicated)), waves=True),
    costs={Collective.ALL_REDUCE: cost},
    stages=stages,
    counts=counts,
)
