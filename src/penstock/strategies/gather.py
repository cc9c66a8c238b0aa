"""Compressed all-reduces that only gather: each rank encodes its own data once, all decode everything.

A codec is applied once to each rank's data and never to a sum, so the error is the smallest there is, and no message
waits for another rank's codec. It costs N-1 payloads each way, which is best where latency counts more than bytes.

`all_gather` sends directly:

    3 ranks; [0] is rank 0's payload

    step 1   0 -> 1: [0]   1 -> 2: [1]   2 -> 0: [2]
    step 2   0 -> 2: [0]   1 -> 0: [1]   2 -> 1: [2]

`recursive_doubling` exchanges all that was collected with a partner at twice the distance each time. In the dense
strategy both partners send a sum. Here a sum would be encoded by several ranks, and a codec that rounds at random
would give each of them another payload: so payloads are collected instead, and added up at the end.

    5 ranks, folded as the dense strategy is

    step 1     4 -> 0: [4]
    step 2-3   0 -> 1: [0] [4]      1 -> 0: [1]         2 <-> 3: [2], [3]
    step 4-6   0 -> 2: [0] [1] [4]  2 -> 0: [2] [3]     1 and 3 likewise
    step 7-10  0 -> 4: [0] [1] [2] [3]

All ranks add the payloads in the order of the ranks, so all end with the same bits. What a rank's codec did not send
is in that rank's residual.
"""

from collections.abc import Collection, Iterator, Sequence

from penstock.program import Collective, Part, Slice
from penstock.program.builder import PartBuilder
from penstock.strategies.closed_form import SyncCounts, floor_log2
from penstock.strategies.pipeline import DEPTH, blocks
from penstock.strategies.strategy import Options, Strategy

_new = tuple.__new__  # as in the builder: there are thousands of slices
Turn = tuple[int | None, int, int | None, int]  # receive whose payload from which rank, and send whose to which


def all_gather(rank: int, world_size: int, numel: int, options: Options, empty: Collection[int] = ()) -> Part:
    """Give every rank's payload to every rank directly: N-1 messages each way; nothing at positions in `empty`."""
    builder = PartBuilder("all_gather", Collective.ALL_REDUCE, rank, world_size, numel)
    return _gather(builder, options, empty, list(_direct(rank, world_size)))


def doubling(rank: int, world_size: int, numel: int, options: Options, empty: Collection[int] = ()) -> Part:
    """Give every rank's payload to every rank by exchanges at doubling distances."""
    builder = PartBuilder("recursive_doubling", Collective.ALL_REDUCE, rank, world_size, numel)
    return _gather(builder, options, empty, list(_doubling(rank, world_size)))


def _gather(builder: PartBuilder, options: Options, empty: Collection[int], turns: list[Turn]) -> Part:
    """Encode, take all turns and add up, block by block: one travels while the next is encoded."""
    numel = builder.numel
    pieces = [
        block
        for block in blocks(0, numel, options.block_numel or numel)
        if not all(position in empty for position in range(block.start, block.stop))
    ]
    for rank in range(builder.world_size if pieces else 0):
        builder.scratch(_buffer(rank), numel, encoded=True)
    names = [_buffer(rank) for rank in range(builder.world_size)]
    payloads = {block: [_new(Slice, (name, block.start, block.stop)) for name in names] for block in pieces}
    receives: list[int] = []
    for block, before in zip(pieces, [None, *pieces], strict=False):
        _send_all(builder, block, payloads[block], turns, receives)
        if before is not None:
            _add_all(builder, before, payloads[before])
    for block in pieces[-1:]:
        _add_all(builder, block, payloads[block])
    return builder.build()


def _send_all(
    builder: PartBuilder, block: Slice, payloads: Sequence[Slice], turns: list[Turn], receives: list[int]
) -> None:
    """Take the turns of one block; `payloads` has a place for each rank's.

    `receives` are those so far, each posted after the one `DEPTH` before it.

    All ranks take them in the same order, so that those in flight are the next on both sides of every link.
    """
    builder.encode(payloads[builder.rank], block)
    for arriving, source, leaving, target in turns:
        if arriving is not None:
            receives.append(builder.issued)
            builder.recv(source, payloads[arriving], after=receives[-DEPTH - 1 : -DEPTH])
        if leaving is not None:
            builder.send(target, payloads[leaving])


def _add_all(builder: PartBuilder, block: Slice, payloads: Sequence[Slice]) -> None:
    builder.decode(block, payloads[0])
    for payload in payloads[1:]:
        builder.merge(block, payload)


def _direct(rank: int, world_size: int) -> Iterator[Turn]:
    for step in range(1, world_size):
        source = (rank - step) % world_size
        yield source, source, rank, (rank + step) % world_size


def _doubling(rank: int, world_size: int) -> Iterator[Turn]:
    """Yield the turns of a rank: what it gets of each partner, and what that lacks."""
    power = 1 << floor_log2(world_size)
    if rank >= power:
        yield None, rank - power, rank, rank - power
        yield from ((whose, rank - power, None, rank - power) for whose in range(world_size) if whose != rank)
        return
    if rank + power < world_size:
        yield rank + power, rank + power, None, rank + power
    for turn in range(power.bit_length() - 1):
        partner = rank ^ 1 << turn
        arriving, leaving = (_held(one, turn, power, world_size) for one in (partner, rank))
        for index in range(max(len(arriving), len(leaving))):
            yield (
                arriving[index] if index < len(arriving) else None,
                partner,
                leaving[index] if index < len(leaving) else None,
                partner,
            )
    if rank + power < world_size:
        yield from ((None, rank + power, whose, rank + power) for whose in range(world_size) if whose != rank + power)


def _held(rank: int, turn: int, power: int, world_size: int) -> list[int]:
    """Return whose payloads a rank has after `turn` exchanges: those of an aligned group, and of ranks folded into it.

    >>> _held(1, 1, 4, 5)
    [0, 1, 4]
    """
    first = rank >> turn << turn
    group = range(first, first + (1 << turn))
    return [*group, *(one + power for one in group if one + power < world_size)]


def _buffer(rank: int) -> str:
    return f"rank{rank}"


def counts(workers: int, pieces: int) -> SyncCounts:
    """Every rank encodes its pieces once, sends them to all others and decodes those of all: few steps, many bytes."""
    return SyncCounts(workers - 1, 1, workers)


ALL_GATHER = Strategy("all_gather", coded=all_gather, counts=counts)
