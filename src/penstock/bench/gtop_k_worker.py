"""One rank of `penstock bench gtop-k`: iterations of gTop-k's Table VII with real communication.

An iteration is the paper's: computing, then compressing, then communicating, nothing overlapped. Computing and
compressing are waiting, as long as the paper's GPU took (Table VI, Fig. 11); gradients and blocks travel.
"""

import json
import sys
from dataclasses import dataclass
from time import sleep
from typing import Any

import numpy as np

from penstock.bench.jobs import report
from penstock.bench.sparse_worker import DENSE, Preselected, timed
from penstock.codecs.sparse.codec import SparseCodec
from penstock.runtime.communicator import Communicator
from penstock.runtime.connect import connected

METHODS = ("topk_allgather", "gtopk", "gtopk_doubling", DENSE)


@dataclass(frozen=True, slots=True)
class Case:
    """One model of the table."""

    model: str
    numel: int
    compute_seconds: float
    compress_seconds: float


def main() -> None:
    """Replay the cases given as JSON on the command line."""
    document: dict[str, Any] = json.loads(sys.argv[1])
    with connected(document["engine"]) as transport:
        communicator = Communicator(transport, timeout_seconds=100.0)
        for case in document["cases"]:
            _replay(communicator, Case(**case), document["density"], document["iterations"])


def _replay(communicator: Communicator, case: Case, density: float, iterations: int) -> None:
    data, residual = np.zeros(case.numel, np.float32), np.zeros(case.numel, np.float32)
    codec = Preselected(SparseCodec(density, index_form="int32"), case.numel, communicator.transport.rank)

    def iterate(method: str) -> None:
        sleep(case.compute_seconds)
        if method == DENSE:
            communicator.all_reduce(data, DENSE)
        else:
            sleep(case.compress_seconds)
            communicator.all_reduce(data, method, codec, residual)

    for method in METHODS:
        times = [timed(communicator, lambda m=method: iterate(m)) for _ in range(iterations + 1)]
        report(communicator.transport.rank, {"model": case.model, "method": method, "times": times[1:]})


if __name__ == "__main__":
    main()
