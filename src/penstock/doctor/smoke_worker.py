"""One worker of the smoke test: `python -m penstock.doctor.smoke_worker gloo`."""

import sys
import time

import numpy as np

from penstock.doctor.smoke import PREFIX
from penstock.errors import PenstockError
from penstock.runtime.communicator import Communicator
from penstock.runtime.connect import connected

NUMEL = 100_003  # odd: pieces of unequal size


def main(engine: str) -> None:
    """All-reduce a vector with the other workers; print how long it took, or fail."""
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
