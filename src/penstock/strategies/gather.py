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

from collections.abc import Collection, Iterable, Iterator

from penstock.program import Collective, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.strategies.fold import largest_power_of_two
from penstock.strategies.options import Options
from penstock.strategies.pipeline import blocks

Message = tuple[int, int, int]  # (from, to, whose payload)


def all_gather(world_size: int, numel: int, options: Options, empty: Collection[int] = ()) -> Program:
    """Give every rank's payload to every rank directly: N-1 messages each way; nothing at positions in `empty`."""
    return _gather("all_gather", world_size, numel, options, empty, list(_direct(world_size)))


def recursive_doubling(world_size: int, numel: int, options: Options, empty: Collection[int] = ()) -> Program:
    """Give every rank's payload to every rank by exchanges at doubling distances."""
    return _gather("recursive_doubling", world_size, numel, options, empty, list(_doubling(world_size)))


def _gather(
    name: str, world_size: int, numel: int, options: Options, empty: Collection[int], messages: Iterable[Message]
) -> Program:
    """Encode, carry out `messages` and add up, block by block: one travels while the next is encoded."""
    builder = ProgramBuilder(name, Collective.ALL_REDUCE, world_size, numel)
    pieces = [
        block
        for block in blocks(0, numel, options.block_numel or numel)
        if not all(position in empty for position in range(block.start, block.stop))
    ]
    for rank in range(world_size if pieces else 0):
        builder.scratch(_buffer(rank), numel, encoded=True)
    for block, before in zip(pieces, [None, *pieces], strict=False):
        _send_all(builder, block, messages)
        if before is not None:
            _add_all(builder, before)
    for block in pieces[-1:]:
        _add_all(builder, block)
    return builder.build()


def _send_all(builder: ProgramBuilder, block: Slice, messages: Iterable[Message]) -> None:
    for rank in range(builder.world_size):
        builder.encode(rank, _payload(rank, block), block)
    for source, target, whose in messages:
        builder.message(source, target, _payload(whose, block), _payload(whose, block))


def _add_all(builder: ProgramBuilder, block: Slice) -> None:
    for rank in range(builder.world_size):
        builder.decode(rank, block, _payload(0, block))
        for other in range(1, builder.world_size):
            builder.merge(rank, block, _payload(other, block))


def _direct(world_size: int) -> Iterator[Message]:
    for step in range(1, world_size):
        for rank in range(world_size):
            yield rank, (rank + step) % world_size, rank


def _doubling(world_size: int) -> Iterator[Message]:
    power = largest_power_of_two(world_size)
    held = [[rank] for rank in range(world_size)]
    for extra in range(power, world_size):
        yield from _give(held, [(extra, extra - power)])
    for turn in range(power.bit_length() - 1):
        yield from _give(held, [(rank, rank ^ 1 << turn) for rank in range(power)])
    for extra in range(power, world_size):
        yield from _give(held, [(extra - power, extra)])


def _give(held: list[list[int]], pairs: Iterable[tuple[int, int]]) -> Iterator[Message]:
    """Yield what each source has and its target lacks, all at once."""
    given = [(source, target, [one for one in held[source] if one not in held[target]]) for source, target in pairs]
    for source, target, payloads in given:
        held[target] += payloads
        yield from ((source, target, whose) for whose in payloads)


def _payload(whose: int, block: Slice) -> Slice:
    return Slice(_buffer(whose), block.start, block.stop)


def _buffer(rank: int) -> str:
    return f"rank{rank}"
