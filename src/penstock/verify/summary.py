"""A program in a few numbers, beside the least that any program for its collective needs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock.program import Collective, Op, Program


@dataclass(frozen=True, slots=True)
class Summary:
    """Steps, messages and bytes of a program, and the lower bounds of its collective."""

    steps: int  # time steps, one message out and one in per rank and step
    messages: int
    link_nbytes: dict[tuple[int, int], int]  # (source, target): bytes sent
    least_steps: int  # ceil(log2 P): the number of informed ranks can at most double per step
    least_nic_nbytes: int  # what some rank must at least send or receive

    @property
    def bytes_per_link(self) -> int:
        """Return the bytes over the busiest link in one direction."""
        return max(self.link_nbytes.values(), default=0)

    @property
    def bytes_per_nic(self) -> int:
        """Return the bytes that the busiest rank sends or receives, whichever is more."""
        totals: Counter[tuple[str, int]] = Counter()
        for (source, target), nbytes in self.link_nbytes.items():
            totals["out", source] += nbytes
            totals["in", target] += nbytes
        return max(totals.values(), default=0)

    @property
    def step_ratio(self) -> float:
        """Return steps over the least: 1 is optimal."""
        return self.steps / self.least_steps if self.least_steps else 1.0

    @property
    def byte_ratio(self) -> float:
        """Return the busiest rank's bytes over the least: 1 is optimal."""
        return self.bytes_per_nic / self.least_nic_nbytes if self.least_nic_nbytes else 1.0


def summarise(
    program: Program, steps: int, itemsize: int = 4, encoded_nbytes: Callable[[int], int] | None = None
) -> Summary:
    """Count the messages and bytes of `program`, whose elements take `itemsize` bytes each.

    `encoded_nbytes` says how many bytes so many elements take encoded; without it they count as dense.
    """
    links: Counter[tuple[int, int]] = Counter()
    messages = 0
    for rank, instructions in enumerate(program.ranks):
        for one in instructions:
            if one.op is Op.SEND and one.peer is not None and one.read is not None:
                encoded = encoded_nbytes is not None and program.buffer(one.read.buffer).encoded
                numel = one.read.numel
                links[rank, one.peer] += encoded_nbytes(numel) if encoded and encoded_nbytes else numel * itemsize
                messages += 1
    least_steps = (program.world_size - 1).bit_length() if program.numel else 0
    least_nbytes = least_nic_elements(program.collective, program.world_size, program.numel) * itemsize
    return Summary(steps, messages, dict(sorted(links.items())), least_steps, least_nbytes)


def least_nic_elements(collective: Collective, world_size: int, numel: int) -> int:
    """Return how many elements some rank must send or receive, whatever the program.

    Broadcast and reduce: all of them. Reduce-scatter: every rank sends all but its own chunk; all-gather receives
    it. All-reduce: both together, 2 (P-1)/P n (Patarasuk and Yuan 2009).
    """
    if world_size == 1:
        return 0
    share = -(-numel * (world_size - 1) // world_size)
    if collective is Collective.ALL_REDUCE:
        return -(-2 * numel * (world_size - 1) // world_size)
    return numel if collective in (Collective.BROADCAST, Collective.REDUCE) else share
