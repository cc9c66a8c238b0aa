"""A rank of MPI that is lost while the wrapper's transport is made: `mpirun ... torch_mpi_lost.py STORE POINT SIGNAL`.

The last rank sends itself the signal at the point: before MPI starts, or before a communicator is made. The others
print what they raise, and end as a script does that has nothing more to do.
"""

import os
import signal
import sys
from datetime import timedelta

import torch.distributed as dist

import penstock.torch.engines as engines
from penstock.errors import TransportError

TIMEOUT = timedelta(seconds=3)


def strike(*_arguments: object, **_options: object) -> None:
    """Send this rank the signal."""
    print(f"strikes {os.getpid()}", flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))


def main() -> None:
    """Be a rank."""
    rank, world_size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world_size)
    group = dist.new_group(timeout=TIMEOUT)
    dist.barrier()
    if rank == world_size - 1 and sys.argv[2] == "start":
        engines._place = strike
    elif rank == world_size - 1:
        from penstock.runtime.transport.mpi import MpiTransport

        MpiTransport.__init__ = strike
    try:
        engines.own_transport("mpi", group)
    except TransportError as error:
        print(f"rank {rank} raised {error}", flush=True)


if __name__ == "__main__":
    main()
