"""One rank of `sparse.py`: times sparse all-reduces of blocks that were selected beforehand.

What is timed is the exchange: messages, and merges of blocks. Selecting from the gradient, and writing the result into
it, are work of each host's own processor; sixteen hosts that share two cores would do it one after the other, so it is
measured alone and said beside. Merges are `computed`, or `waited` for: the rank sleeps as long as a merge takes on a
core of its own, and what travels is as large as ever.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import monotonic, sleep
from typing import Any

import numpy as np

from penstock.bench.jobs import report
from penstock.bench.quiet import gather, process_seconds, processors, seconds_of_others, wait_until_idle
from penstock.bench.stream import latency_seconds, stream_network
from penstock.codecs.codec import Capabilities, Codec
from penstock.codecs.sparse.block import BlockForm, Entries
from penstock.codecs.sparse.sparse_codec import SparseCodec
from penstock.network import network_document
from penstock.runtime.communicator import Communicator
from penstock.runtime.connect import connected
from penstock.runtime.transport import Array, Bytes
from rounds import measure_rounds

DENSE = "ring"
_STARTS = 9
_READY_SECONDS = 0.03  # until all ranks have heard when to start
_OTHER_SEED = 1 << 20  # no rank's number: ranks are the seeds of their blocks


@dataclass(frozen=True, slots=True)
class SparseJob:
    """What the ranks are asked to measure."""

    engine: str
    numel: int
    densities: tuple[float, ...]
    strategies: tuple[str, ...]
    merge_seconds: tuple[float, ...]  # of each density, on a core of its own
    merges: str  # computed or waited
    index_form: str
    rounds: int
    dense_rounds: int  # of the dense ring; 0: leave it out
    patience_seconds: float  # for the machine to be quiet, in all


def main() -> None:
    """Measure the job given as JSON on the command line."""
    document: dict[str, Any] = json.loads(sys.argv[-1])
    lists: dict[str, Any] = {name: tuple(value) for name, value in document.items() if isinstance(value, list)}
    job = SparseJob(**{**document, **lists})
    with connected(job.engine) as transport:
        communicator = Communicator(transport, timeout_seconds=100.0)
        patience = wait_until_idle(communicator, job.patience_seconds)
        network = network_document(stream_network(transport, job.engine))
        report(transport.rank, {"network": {**network, "latency_seconds": latency_seconds(transport)}})
        for density, seconds in zip(job.densities, job.merge_seconds, strict=True):
            patience = wait_until_idle(communicator, patience)
            _measure_sparse(communicator, job, density, seconds)
        if job.dense_rounds:
            _measure_dense(communicator, job)


def _measure_sparse(communicator: Communicator, job: SparseJob, density: float, merge_seconds: float) -> None:
    rank = communicator.transport.rank
    data, residual = np.zeros(job.numel, np.float32), np.zeros(job.numel, np.float32)
    residual.fill(0)  # now: a page that is touched for the first time costs more than the value put there
    codec = Preselected(SparseCodec(density, index_form=job.index_form), job.numel, rank)
    times: dict[str, list[float]] = {strategy: [] for strategy in job.strategies}
    codec.waits = merge_seconds if job.merges == "waited" else None
    measured = measure_rounds(communicator.transport, job.strategies, codec.block.size, merging(codec, residual))
    report(rank, {"rounds": measured.document(), "start_seconds": start_seconds(communicator)})
    others = Others(communicator)
    for turn in range(job.rounds + 1):
        for strategy in job.strategies:
            codec.waits = merge_seconds if job.merges == "waited" and turn else None
            seconds = timed(communicator, lambda s=strategy: communicator.all_reduce(data, s, codec, residual))
            if turn:
                times[strategy].append(seconds)
            elif strategy != "topk_allgather":  # the first turn also shows that all ranks have the same result
                checksums = gather(communicator, np.array([codec.checksum()]))
                assert np.all(checksums == checksums[0]), f"{strategy}: ranks end with different blocks"
    share = others.share()
    for strategy, found in times.items():
        row = {"strategy": strategy, "density": density, "block_nbytes": codec.block.size, "times": found}
        report(rank, {**row, "others": share})


def _measure_dense(communicator: Communicator, job: SparseJob) -> None:
    data = np.zeros(job.numel, np.float32)
    others = Others(communicator)
    times = [timed(communicator, lambda: communicator.all_reduce(data, DENSE)) for _ in range(job.dense_rounds + 1)]
    row = {"strategy": DENSE, "density": None, "block_nbytes": None, "times": times[1:], "others": others.share()}
    report(communicator.transport.rank, row)


def merging(codec: "Preselected", residual: Array) -> Callable[[], None]:
    """Return one merge, or one wait for it, as the all-reduces have them."""
    other, kept = random_block(codec.codec, residual.size, seed=_OTHER_SEED), codec.block.copy()
    codec.codec.merge(other, kept, residual)  # compiles it
    return lambda: codec.merge(other, kept, residual)


def start_seconds(communicator: Communicator) -> float:
    """Return how far apart the ranks start: what is timed where nothing is done."""
    return median(timed(communicator, lambda: None) for _ in range(_STARTS))


def timed(communicator: Communicator, run: Any) -> float:
    """Return the seconds from the first rank's start to the last rank's end.

    They start by the clock, which emulated hosts share: 16 ranks leave a barrier up to 11 ms apart on two cores.
    """
    together = gather(communicator, np.array([monotonic()])).max() + _READY_SECONDS
    sleep(max(0.0, together - monotonic()))
    start = monotonic()
    run()
    moments = gather(communicator, np.array([start, monotonic()]))
    return round(float(moments[:, 1].max() - moments[:, 0].min()), 7)


class Others:
    """How much of this machine's processors others use from now on."""

    def __init__(self, communicator: Communicator) -> None:
        self._ours = {int(process) for process in gather(communicator, np.array([float(os.getpid())])).flat}
        self._began, self._before = monotonic(), process_seconds()

    def share(self) -> float:
        """Return their share of all processors' time so far."""
        used = seconds_of_others(self._before, process_seconds(), self._ours)
        return round(used / (monotonic() - self._began) / processors(), 3)


class Preselected(Codec):
    """A sparse codec whose block is there already, and whose result stays a block."""

    capabilities = Capabilities(merging=True)

    def __init__(self, codec: SparseCodec, numel: int, seed: int) -> None:
        self.codec = codec
        self.block = random_block(codec, numel, seed)
        self._result = self.block.copy()
        self.waits: float | None = None  # seconds to sleep instead of merging

    @property
    def name(self) -> str:
        """The codec and its settings."""
        return self.codec.name

    def max_nbytes(self, numel: int) -> int:
        """Return the bytes of a block."""
        return self.codec.max_nbytes(numel)

    def encode(self, read: Array, residual: Array | None, out: Bytes) -> int:
        """Write the block."""
        out[:] = self.block
        return self.block.size

    def merge(self, read: Bytes, write: Bytes, residual: Array | None) -> None:
        """Merge, or wait as long as that would take."""
        if self.waits is None:
            self.codec.merge(read, write, residual)
        else:
            sleep(self.waits)

    def decode(self, read: Bytes, out: Array) -> None:
        """Keep the result as it is."""
        self._result[:] = read

    def decode_add(self, read: Bytes, out: Array) -> None:
        """Leave the block where it is: adding it to a gradient is not communication."""

    def checksum(self) -> float:
        """Return a number that differs where results do."""
        return float(self._result.view(np.uint16).sum(dtype=np.uint64))


def random_block(codec: SparseCodec, numel: int, seed: int) -> Bytes:
    """Return a block of random places and values, as independent gradients have them."""
    rng, count = np.random.default_rng(seed), codec.entries(numel)
    indices = np.unique(rng.integers(0, numel, 2 * count))
    indices = np.sort(rng.choice(indices, count, replace=False)).astype(np.int32)
    values = ((3 + rng.exponential(0.3, count)) * rng.choice([-1.0, 1.0], count)).astype(np.float32)
    form = BlockForm.of(numel, count, codec.value_bits, codec.index_form)
    block = np.zeros(codec.max_nbytes(numel), np.uint8)
    header = codec.max_nbytes(numel) - form.max_nbytes
    codec.write_header(block, numel, form.write(Entries(indices, values), block[header:]))
    return block


if __name__ == "__main__":
    main()
