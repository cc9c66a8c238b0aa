"""How large the blocks of rings and pipelines are, where nobody said.

Between hosts, blocks keep all links busy at once; the strategies' own sizes do that, or those the cost model finds
best on a measured network. Where all ranks share one host with few cores, the processor is the link: a message keeps
the core of its sender and that of its receiver busy, so only `cores / 2` messages move at once whatever the program
says, and cutting finer only adds what a message costs. With gloo over loopback that is much: 0.3 ms of processor time
each, as its thread polls the socket while the caller's thread writes to it (4 ranks, 2 cores, 16 MB pipelined: 75 ms
of processor time in blocks of 256 KB, 23 ms in blocks of 4 MB).
"""

import os
from typing import Any

from penstock.codecs.codec import Codec
from penstock.cost.collectives import best_block_nbytes
from penstock.network import Network
from penstock.program import Collective
from penstock.runtime.views import Flat, storage_dtype
from penstock.strategies.options import SMALLEST_BLOCK

CROWDED_NBYTES = 4 << 20  # of a block where ranks outnumber half the cores of their one host

CODED_NBYTES = 256 << 10  # of a compressed message; with 64 KB a ring of 15M elements used 1.6x the processor time


def processors() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def coded_block(codec: Codec) -> int:
    """Return how many elements a codec makes about `CODED_NBYTES` of, judged by a million."""
    return max(SMALLEST_BLOCK, (CODED_NBYTES << 20) // max(codec.max_nbytes(1 << 20), 1))


def with_block(
    options: dict[str, Any],
    collective: Collective,
    strategy: str,
    target: Flat,
    world_size: int,
    network: Network | None,
    shared_cores: int,
) -> dict[str, Any]:
    """Return the options with a block size where the strategy's own is not the best; a given one is kept.

    `shared_cores` is how many cores the ranks share if all of them are on one host, else 0.
    """
    if "block_numel" in options:
        return options
    itemsize = storage_dtype(target.dtype).itemsize
    if 0 < shared_cores < 2 * world_size:
        return {**options, "block_numel": CROWDED_NBYTES // itemsize}
    if network is None or strategy.replace("-", "_") != "linear_pipeline":
        return options
    nbytes = best_block_nbytes(network, world_size, target.nbytes, collective.value)
    return {**options, "block_numel": max(SMALLEST_BLOCK, round(nbytes / itemsize))}
