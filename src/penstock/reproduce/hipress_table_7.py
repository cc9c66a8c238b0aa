"""HiPress Table 7: which gradients to compress, in how many partitions, from the constants that were published.

The constants are those the authors' planner shipped with (milliseconds and float32 elements there). They are not those
behind the table, so cells differ; each says why. The planner also counts a parameter server's work in another way than
section 6 of the paper: K+1 encodes and N-1+K decodes, and a gather and a broadcast with lines of their own for each N.
Cells are computed with the paper's counts; where only the planner's give the published cell, the verdict says so.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from penstock.cost.clusters import CLUSTERS, HIPRESS_RATIO, curve_of_elements
from penstock.cost.papers import CASYNC, sync_seconds
from penstock.planners.selective import Choice, choose
from penstock.reproduce.claim import Claim, check_equal, check_statement, compare_own

_MIB = 2**20
RATIO, ONEBIT = HIPRESS_RATIO, CLUSTERS["hipress-100gbps"].codecs["onebit"]
SEND = curve_of_elements(8.5005e-07, 0.20337, 0.09766)
GATHER = {4: curve_of_elements(2.7156e-06, 0.4193, 0.15573), 16: curve_of_elements(1.2937e-05, 1.4406, 0.59503)}
BROADCAST = {4: curve_of_elements(2.7157e-06, 0.22156, 0.1482), 16: curve_of_elements(1.2915e-05, 0.45538, 0.58353)}


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of Table 7: compress or not, and the number of partitions."""

    strategy: str
    nodes: int
    mib: int
    compress: bool
    partitions: int
    why: str = ""  # the published choice cannot, or does not, come out

    @property
    def nbytes(self) -> int:
        """Of the gradient."""
        return self.mib * _MIB


_RING_TIE = (
    "a ring's counts do not depend on K, so by Eq. 2 fewer than N partitions can at best tie with N, where all three "
    "curves are flat up to {part:g} MB; the published encode curve is flat nowhere"
)
_SAME_SENDS = (
    "at the published rate of 1/16, one compressed partition is as long as each of 16 dense ones, so by Eq. 1 and 2 "
    "compressing costs its encodes and decodes more, whatever their curves"
)
_BATCHES = (
    "K is at most N in Table 3; the extension to ceil(K/N) batches repeats every startup and saves no byte, so by "
    "Eq. 2 12 partitions on 4 nodes cannot be best; a pipeline across batches is not in the equations"
)
_DECODES = (
    "the encodes' startup against the sends' bytes puts the minimum there; with the planner's own counts, where "
    "decodes grow with K too, it is 6 as published"
)

_OTHERS = "the constants it ships with are not those behind the table"

TABLE_7 = (
    Cell("casync_ps_colocated", 4, 4, True, 2), Cell("casync_ps_colocated", 16, 4, True, 1, _SAME_SENDS),
    Cell("casync_ring", 4, 4, True, 1, _RING_TIE.format(part=4)), Cell("casync_ring", 16, 4, False, 16),
    Cell("casync_ps_colocated", 4, 16, True, 4), Cell("casync_ps_colocated", 16, 16, True, 6, _DECODES),
    Cell("casync_ring", 4, 16, True, 4), Cell("casync_ring", 16, 16, True, 5, _RING_TIE.format(part=3.2)),
    Cell("casync_ps_colocated", 4, 392, True, 12, _BATCHES), Cell("casync_ps_colocated", 16, 392, True, 16),
    Cell("casync_ring", 4, 392, True, 4), Cell("casync_ring", 16, 392, True, 16),
)  # fmt: skip


def table_7() -> list[Claim]:
    """Return a claim for each cell, and how many the planner's own counts give."""
    matching = sum(planners_choice(cell) == (cell.compress, cell.partitions) for cell in TABLE_7)
    what = "Table 7: its cells, from the planner that its authors published"
    return [
        *(_claim(cell) for cell in TABLE_7),
        compare_own("own/table-7", what, "12", [(matching, matching)], "computed", _OTHERS),
        *_thresholds(),
    ]


def _thresholds() -> Iterator[Claim]:
    """Section 6.1: "with 16 nodes, CaSync suggests to compress gradients larger than 4MB"."""
    for strategy in ("casync_ps_colocated", "casync_ring"):
        least = 1 + bisect_left(range(1, 1 << 20), True, key=partial(_is_compressed, strategy))  # KiB
        what = f"section 6.1, 16 nodes, {_short(strategy)}: gradients above 4 MB are compressed, smaller ones are not"
        found = f"from {least / 1024:.1f} MB"
        says = 4 << 10 < least <= (4 << 10) + 1
        yield check_statement(f"section-6.1/{_short(strategy)}", what, says, "computed", found, _OTHERS)


def _is_compressed(strategy: str, kib: int) -> bool:
    return choose(CASYNC[strategy], 16, kib << 10, SEND, ONEBIT).compress


def _short(strategy: str) -> str:
    return "PS" if "ps" in strategy else "Ring"


def our_choice(cell: Cell) -> Choice:
    """Return what Eq. 1 and 2 say with the paper's counts."""
    return choose(CASYNC[cell.strategy], cell.nodes, cell.nbytes, SEND, ONEBIT)


def published_seconds(cell: Cell) -> float:
    """Return what the published choice would take, by the same equations and constants."""
    codec = ONEBIT if cell.compress else None
    return sync_seconds(CASYNC[cell.strategy], cell.nodes, cell.partitions, cell.nbytes, SEND, codec)


def planners_choice(cell: Cell) -> tuple[bool, int]:
    """Return what the planner's own counts say; for a ring they are the paper's."""
    if cell.strategy == "casync_ring":
        found = our_choice(cell)
        return found.compress, found.partitions
    choices = [(compress, k) for compress in (False, True) for k in range(1, cell.nodes + 1)]
    return min(choices, key=lambda one: _gathered_seconds(cell, *one))


def _gathered_seconds(cell: Cell, compress: bool, k: int) -> float:
    n, part = cell.nodes, cell.nbytes / k
    wire = part * RATIO if compress else part
    sending = GATHER[n].seconds(wire) + BROADCAST[n].seconds(wire)
    if not compress:
        return sending
    encodes, decodes = min(k + 1, n), min(n - 1 + k, 2 * (n - 1))
    return sending + encodes * ONEBIT.encode.seconds(part) + decodes * ONEBIT.decode.seconds(part)


def _claim(cell: Cell) -> Claim:
    ours = our_choice(cell)
    name = _short(cell.strategy)
    published, found = (cell.compress, cell.partitions), (ours.compress, ours.partitions)
    more = 100 * (published_seconds(cell) / ours.seconds - 1)
    what = f"Table 7, {cell.mib} MB, {name}, {cell.nodes} nodes: compress, partitions"
    key = f"table-7/{name}/{cell.nodes}/{cell.mib}"
    return check_equal(key, what, published, found, "computed", f"{cell.why}; published is {more:.0f}% slower here")
