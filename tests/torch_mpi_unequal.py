"""A rank of MPI that may make fewer calls than others: `mpirun ... torch_mpi_unequal.py STORE ODD ROUTE WHAT`.

It prints what `train` of the test of unequal calls returns, as JSON. The odd one makes fewer, and lives on.
"""

import json
import os
import sys

import torch.distributed as dist

from penstock.torch.engines import end_mpi
from security.test_unequal_calls import train


def main() -> None:
    """Be a rank."""
    rank, world_size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    store, odd, route, what = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    said, seconds = train(rank, int(odd), route, what, "stays", "", "mpi")
    print(json.dumps([rank, said, seconds]), flush=True)
    end_mpi()


if __name__ == "__main__":
    main()
