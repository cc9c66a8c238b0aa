"""The smoke test: two workers on this machine add up a vector over each engine and compare it with the sum.

`python -m penstock.doctor.smoke gloo` is one worker.
"""

import sys
import time
from collections.abc import Sequence

from penstock.cluster.processes import Collected, Worker, run_workers
from penstock.cluster.worker_commands import loopback_workers, mpirun_workers
from penstock.doctor import Finding, broken, works
from penstock.errors import PenstockError

WORKERS = 2
SMOKE_SECONDS = 240.0  # a busy machine takes half a minute to import torch
WORKER = (sys.executable, "-m", "penstock.doctor.smoke")
PREFIX = "smoke test: "  # of the line in which rank 0 says how it went; launchers print lines of their own


def check_smoke(engines: Sequence[str]) -> list[Finding]:
    """Run the smoke test over every engine in `engines`."""
    return [smoke(engine) for engine in engines]


def smoke(engine: str) -> Finding:
    """Run the smoke test over one engine."""
    name = f"{WORKERS} workers over {engine}"
    heard = Collected()
    try:
        outcome = run_workers(workers_of(engine), heard, grace_seconds=2.0, timeout_seconds=SMOKE_SECONDS)
    except PenstockError as error:
        return broken(name, str(error), _REMEDIES[engine])
    if outcome.exit_code != 0:
        return broken(name, complaint(heard, outcome.failed_rank or 0), _REMEDIES[engine])
    return works(name, result(heard.text(0)))


def workers_of(engine: str) -> list[Worker]:
    """Return two workers on the loopback interface, or the mpirun that starts them."""
    command = (*WORKER, engine)
    return mpirun_workers(WORKERS, command, {}) if engine == "mpi" else loopback_workers([command] * WORKERS, {})


def result(text: str) -> str:
    """Return what rank 0 says of its result."""
    return next(line.partition(PREFIX)[2].strip() for line in text.splitlines() if PREFIX in line)


def complaint(heard: Collected, rank: int) -> str:
    """Return the last line on standard error that names an error, or the last one at all."""
    said = [line.strip() for line in heard.text(rank, "stderr").splitlines() if line.strip()]
    named = [line for line in said if "Error" in line]
    return (named or said or ["it said nothing"])[-1]


_REMEDIES = {
    "gloo": "does a firewall close loopback? try `torchrun --nproc-per-node 2 -m penstock measure`",
    "mpi": "try `mpirun -n 2 hostname`; what it says is Open MPI's own trouble",
}


NUMEL = 100_003  # odd: pieces of unequal size


def main(engine: str) -> None:
    """Run one worker: all-reduce a vector with the others; print how long it took, or fail."""
    import numpy as np

    from penstock.runtime.communicator import Communicator
    from penstock.runtime.connect import connected

    with connected(engine) as transport:
        communicator = Communicator(transport, timeout_seconds=30.0)
        wanted = sum(range(1, transport.world_size + 1))
        for _ in range(2):  # the first call compiles and compares programs
            values = np.full(NUMEL, 1.0 + transport.rank, dtype=np.float32)
            started = time.perf_counter()
            communicator.all_reduce(values)
            seconds = time.perf_counter() - started
            if not (values == wanted).all():
                raise PenstockError(f"ring over {engine}: the sum is {values[0]}; wanted {wanted}")
        if transport.rank == 0:
            print(f"{PREFIX}{values.nbytes / 1e3:.0f} kB all-reduced by ring in {1e3 * seconds:.1f} ms, rightly")


if __name__ == "__main__":
    main(sys.argv[1])
