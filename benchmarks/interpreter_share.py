"""What the interpreter costs a rank: processor time of a steady iteration of an exchange whose tensors are small.

Tensors of 8,192 elements give programs of as many instructions as a model's own, one chunk for each of four ranks, and
leave kernels and wires little to do: what is left is Python, and what an in-process engine takes for a message. Ranks
are threads of one process. Processor time, not a clock's: other programs on the machine matter less.
"""

import threading
from time import perf_counter, process_time
from typing import Annotated, Any

import numpy as np
import typer

from penstock.bench.record import make_record, save_record
from penstock.cli.options import JsonOption, RecordOption, split_list
from penstock.cli.output import format_seconds, print_json, print_table
from penstock.exchange.compression import Compression
from penstock.exchange.exchange import Exchange
from penstock.runtime.communicator import Communicator
from penstock.runtime.transport.memory import Fabric
from penstock.traces import find_trace
from study import start

NUMEL = 8192  # elements of a tensor: cut for all ranks, and encoded in microseconds
WARM = 3  # iterations


def measure(tensors: int, buckets: int, codec: str, hosts: int, iterations: int) -> dict[str, Any]:
    """Return a rank's processor seconds of an iteration, and how many instructions a rank carries out in it."""
    fabric, found = Fabric(hosts), dict[str, Any]()
    together = threading.Barrier(hosts)

    def rank(number: int) -> None:
        exchange = Exchange(Communicator(fabric.transport(number), timeout_seconds=120), Compression(codec))
        cuts = np.array_split(np.arange(tensors), buckets)
        made = [exchange.bucket([f"t{i}" for i in cut], [NUMEL] * len(cut)) for cut in cuts]
        values = [np.ones(NUMEL * len(cut), np.float32) for cut in cuts]
        for step in range(WARM + iterations):
            exchange.record(step == WARM - 1)
            if step == WARM:
                together.wait()
                if number == 0:
                    found["began"] = process_time(), perf_counter()
                together.wait()
            exchange.begin()
            for handle in [exchange.start(*each) for each in zip(made, values, strict=True)]:
                exchange.wait(handle)
            if number == 0 and step == WARM - 1 and exchange.communicator.recorder is not None:
                found["instructions"] = len(exchange.communicator.recorder.notes)
        together.wait()
        if number == 0:
            found["seconds"] = (process_time() - found["began"][0]) / iterations / hosts
            found["wall_seconds"] = (perf_counter() - found["began"][1]) / iterations
        exchange.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: found[name] for name in ("seconds", "wall_seconds", "instructions")}


def interpreter_share(
    traces: Annotated[
        str, typer.Option(help="models, each with its number of buckets")
    ] = "vgg16:3,vgg16:32,resnet50:161",
    codec: Annotated[str, typer.Option(help="of all buckets")] = "onebit",
    hosts: Annotated[int, typer.Option(help="ranks")] = 4,
    iterations: Annotated[int, typer.Option(help="that are timed", min=1)] = 20,
    iteration_seconds: Annotated[float, typer.Option(help="of training, that the share is of")] = 0.45,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Measure what the interpreter takes of a rank's iteration."""
    rows = []
    for text in split_list(traces):
        trace, _, buckets = text.partition(":")
        row = measure(len(find_trace(trace).tensors), int(buckets or 1), codec, hosts, iterations)
        calls = row["instructions"] / iteration_seconds
        share = row["seconds"] / iteration_seconds
        rows.append({"what": trace, "buckets": int(buckets or 1), **row, "calls_per_second": calls, "share": share})
    if out:
        save_record(make_record("interpreter_share", rows), out)
    if json:
        print_json(rows)
        return
    print_table(
        f"interpreter, {hosts} ranks, {codec}, of an iteration of {format_seconds(iteration_seconds)}",
        ("what", "buckets", "instructions", "instructions/s", "processor time", "share"),
        [
            (
                row["what"],
                row["buckets"],
                row["instructions"],
                f"{row['calls_per_second']:.0f}",
                format_seconds(row["seconds"]),
                f"{100 * row['share']:.1f}%",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    start(interpreter_share)
