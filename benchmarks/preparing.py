"""How long does a rank take to get ready, and how much memory, as ranks are added? One of N ranks, N to 2,048.

    python benchmarks/preparing.py   # prints a table, writes the record and docs/pictures/preparing.png

Measured is what `Communicator` does before the first message of a bucket of 25 million elements: the rank's part is
built, scheduled and laid out (`prepare`), with processor time of this process, the least of three, and the most memory
that Python held meanwhile. Scratch memory, which depends on the strategy and not on the number of ranks, is not
counted. With a codec it is onebit, and for sparse strategies a density of 0.001. A strategy that gathers every rank's
payload needs as many of them in memory; where that is more than 4 GB it is left out. Last, 64 ranks on threads of this
process prepare and run ten buckets: seconds from the first thread's start to the last one's end.
"""

import argparse
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import Any

import numpy as np

from penstock.bench.record import make_record, save_record
from penstock.codecs.codec import Capabilities
from penstock.program import Part
from penstock.runtime import Communicator
from penstock.runtime.executor import prepare
from penstock.runtime.transport.memory import Fabric
from penstock.runtime.views import Scratch
from penstock.strategies import STRATEGIES, Options, Strategy, build_coded_part, build_part
from penstock.strategies.batches import Batches
from penstock.strategies.strategy import coded_block

NUMEL = 25_000_000
WORLDS = (16, 32, 64, 128, 256, 512, 1024, 2048)
LARGEST_SCRATCH = 4 << 30  # bytes
JOB_RANKS, JOB_BUCKETS = 64, 10


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy, dense or with a codec, on one number of ranks."""

    strategy: str
    form: str  # dense, coded or sparse
    workers: int
    instructions: int
    seconds: float  # of processor time
    nbytes: int  # the most that Python held
    scratch_nbytes: int


class OneBit:
    """The sizes of a onebit codec: what preparing asks of one."""

    name = "onebit"
    capabilities = Capabilities()

    def max_nbytes(self, numel: int) -> int:
        """Return a bit for each element, and a header."""
        return 32 + (numel + 7) // 8


class Sparse(OneBit):
    """The sizes of a sparse codec."""

    name = "sparse(density=0.001)"
    capabilities = Capabilities(merging=True)

    def max_nbytes(self, numel: int) -> int:
        """Return an index and a value for each entry that is sent, and a header."""
        return 16 + 8 * -(-numel // 1000)


class NoScratch(Scratch):
    """Reserves nothing: pages of the data's size are not what is measured."""

    def reserve(self, nbytes: int) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A rank that never sends."""

    rank: int
    world_size: int


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="benchmarks/results/starting/preparing.json")
    parser.add_argument("--picture", default="docs/pictures/preparing.png")
    parser.add_argument("--workers", default=",".join(map(str, WORLDS)))
    chosen = parser.parse_args()
    worlds = [int(part) for part in chosen.workers.split(",")]
    rows = [row for world in worlds for row in prepared_rows(world)]
    job = job_seconds(JOB_RANKS, JOB_BUCKETS)
    print_table(rows, worlds)
    print(f"{JOB_RANKS} ranks in one process, {JOB_BUCKETS} buckets prepared and run: {job:.2f} s")
    documents = [*map(asdict, rows), {"ranks": JOB_RANKS, "buckets": JOB_BUCKETS, "job_seconds": job}]
    save_record(make_record("preparing", documents), chosen.out)
    draw(rows, chosen.picture)


def prepared_rows(world_size: int) -> list[Row]:
    """Return every strategy in every form that works on so many ranks."""
    rows = []
    for strategy in STRATEGIES.values():
        if strategy.dense:
            rows.append(measure(strategy, "dense", world_size))
        if strategy.coded is not None and not gathers_too_much(strategy, world_size):
            rows.append(measure(strategy, "coded", world_size))
        if strategy.sparse:
            rows.append(measure(strategy, "sparse", world_size))
    return rows


def gathers_too_much(strategy: Strategy, world_size: int) -> bool:
    """Say whether a strategy that keeps every rank's payload would need more memory than a host should give."""
    gathers = strategy.name in ("all_gather", "recursive_doubling")
    return gathers and world_size * OneBit().max_nbytes(NUMEL) > LARGEST_SCRATCH


def measure(strategy: Strategy, form: str, world_size: int) -> Row:
    """Measure one rank in the middle: it has as much to do as any."""
    rank = world_size // 2
    codec: Any = {"dense": None, "coded": OneBit(), "sparse": Sparse()}[form]
    alone: Any = Standing(rank, world_size)

    def build() -> tuple[Part, Batches | None]:
        if codec is None:
            return build_part("all_reduce", strategy.name, rank, world_size, NUMEL), None
        options = Options(block_numel=coded_block(codec.max_nbytes(1 << 20)))
        return build_coded_part(strategy.name, rank, world_size, (0, NUMEL), options)

    def ready() -> Any:
        part, batches = build()
        return prepare(part, alone, "float32", codec, 4, NoScratch(), batches, "digest")

    seconds = min(timed(ready) for _ in range(3))
    tracemalloc.start()
    prepared = ready()
    nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    instructions = len(prepared.part.instructions)
    return Row(strategy.name, form, world_size, instructions, seconds, nbytes, prepared.binder.layout.nbytes)


def timed(action: Callable[[], Any]) -> float:
    """Return the processor time that `action` takes."""
    start = process_time()
    action()
    return process_time() - start


def job_seconds(world_size: int, buckets: int) -> float:
    """Return how long ranks on threads take until each has run its first call of every bucket."""
    fabric, failures = Fabric(world_size), []

    def run(rank: int) -> None:
        try:
            communicator = Communicator(fabric.transport(rank), timeout_seconds=300)
            for bucket in range(buckets):
                communicator.all_reduce(np.ones(65_536 + bucket, np.float32))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    start = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return perf_counter() - start


def print_table(rows: list[Row], worlds: list[int]) -> None:
    """Print milliseconds for every number of ranks, then instructions and memory on the largest."""
    print("milliseconds of processor time to prepare 25 million elements, on one of N ranks")
    print(f"{'strategy':30}" + "".join(f"{world:>8}" for world in worlds) + "   instructions   MB")
    for strategy, form in dict.fromkeys((row.strategy, row.form) for row in rows):
        own = {row.workers: row for row in rows if (row.strategy, row.form) == (strategy, form)}
        cells = "".join(f"{1e3 * own[w].seconds:8.1f}" if w in own else f"{'-':>8}" for w in worlds)
        last = own[max(own)]
        print(f"{strategy + ', ' + form:30}{cells}{last.instructions:15,}{last.nbytes / 1e6:5.1f}")


def draw(rows: list[Row], path: str) -> None:
    """Draw seconds against ranks for the strategies that take longest, dense and coded."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.add_subplot()
    largest = max(row.workers for row in rows)
    slow = sorted((row for row in rows if row.workers == largest), key=lambda row: -row.seconds)[:8]
    for one in slow:
        own = [row for row in rows if (row.strategy, row.form) == (one.strategy, one.form)]
        axis.plot([row.workers for row in own], [row.seconds for row in own], marker="o", markersize=3,
                  linestyle="-" if one.form == "dense" else "--", label=f"{one.strategy}, {one.form}")  # fmt: skip
    axis.axhline(0.1, color="grey", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds of processor time, one rank",
             title="Preparing a bucket of 25 million elements")  # fmt: skip
    axis.set_xticks(sorted({row.workers for row in rows}), labels=map(str, sorted({row.workers for row in rows})))
    axis.legend(fontsize=7)
    figure.savefig(path)


if __name__ == "__main__":
    main()
