"""Collectives without a training job: sum, hand out, and be told when ranks disagree.

Run alone, it starts three workers itself; it also runs as it is under a launcher:

    torchrun --nproc-per-node 3 examples/collectives.py gloo
    mpirun -n 3 python examples/collectives.py mpi
"""

import os
import socket
import subprocess
import sys

import numpy as np

from penstock.errors import MismatchError
from penstock.runtime import Communicator
from penstock.runtime.connect import connected


def main(engine: str) -> None:
    """Do what every rank does."""
    with connected(engine) as transport:
        communicator = Communicator(transport, timeout_seconds=30)
        gradient = np.full(1_000_000, transport.rank + 1, np.float32)
        communicator.all_reduce(gradient)  # in place, by ring
        weights = np.full(1_000_000, transport.rank, np.float32)
        communicator.broadcast(weights, root=2, strategy="linear_pipeline")
        try:
            communicator.all_reduce(np.zeros(10 + transport.rank))
        except MismatchError as error:
            complaint = str(error)
        if transport.rank == 0:
            print(f"{transport.world_size} ranks: sum {gradient[0]:g}, root's weights {weights[0]:g}")
            print(complaint)


def start_workers(count: int) -> None:
    """Do what torchrun does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    command = [sys.executable, __file__, "gloo"]
    workers = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(count)]
    raise SystemExit(max(worker.wait() for worker in workers))


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) > 1 else start_workers(3)
