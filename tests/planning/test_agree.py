"""Ranks agree over any engine: all get the same, what rank 0 raises is raised on all, and a lost rank is named."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import PlanError, TransportError
from penstock.exchange.compression import Compression
from penstock.network import LinearCost, Network
from penstock.planning.agree import TransportRanks, from_rank_0, nodes_of
from penstock.planning.planning import Planning
from penstock.planning.survey import plan_over
from penstock.runtime.transport.memory import Fabric
from penstock.trace import Tensor, Trace
from runtime.threads import outcomes, run_ranks


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_gets_every_value_by_rank(world_size: int) -> None:
    values = [{"rank": rank, "text": "x" * 1000 * rank} for rank in range(world_size)]

    def rank(transport):
        ranks = TransportRanks(transport)
        return ranks.gather(values[transport.rank], "testing"), ranks.from_first(transport.rank + 7, "testing")

    assert run_ranks(world_size, rank) == [(values, 7)] * world_size


def test_threads_of_one_process_are_on_one_host() -> None:
    assert run_ranks(3, lambda transport: nodes_of(TransportRanks(transport))) == [((0, 1, 2),)] * 3


def test_what_rank_0_raises_is_raised_on_every_rank() -> None:
    def make():
        raise PlanError("no such thing")

    found = outcomes(2, lambda transport: from_rank_0(make, TransportRanks(transport)))
    assert [str(each) for each in found] == ["rank 0 could not plan: PlanError: no such thing"] * 2


def test_a_rank_that_is_gone_is_named() -> None:
    fabric = Fabric(2)
    fabric.kill(1)
    with pytest.raises(TransportError, match=r"rank 0.*1, testing"):
        TransportRanks(fabric.transport(0)).gather(0, "testing")


TRACE = Trace("toy", "cpu", 1, "float32", 1e-3, tuple(Tensor(name, 1 << 20, 1e-3) for name in "dcba"))
LINES = {"native": LinearCost(1e-1, 1e-8), "ring+onebit": LinearCost(1e-3, 1e-10)}


def test_ranks_without_torch_plan_together() -> None:
    network = Network(2, 1e-4, 1e-8, 1e-10, LINES)
    planning = Planning(strategy="ring", network=network, measurements=False)
    decisions = run_ranks(2, lambda transport: plan_over(transport, "memory", TRACE, Compression("onebit"), planning))
    assert decisions[0] == decisions[1]
    plan = decisions[0].plan
    assert {str(bucket.route) for bucket in plan.buckets} == {"ring+onebit"}
    assert sum(bucket.nbytes for bucket in plan.buckets) == 4 * (4 << 20)


def test_a_plan_that_is_given_is_taken() -> None:
    network = Network(1, 1e-4, 1e-8, 1e-10, LINES)
    (decision,) = run_ranks(1, lambda each: plan_over(each, "memory", TRACE, None, Planning(network=network)))
    (given,) = run_ranks(1, lambda each: plan_over(each, "memory", TRACE, None, Planning(plan=decision.plan)))
    assert given.plan == decision.plan


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # any import of torch now fails
import numpy as np
from penstock.exchange.compression import Compression
from penstock.exchange.exchange import Exchange
from penstock.planning.planning import Planning
from penstock.planning.survey import plan_over
from penstock.runtime.communicator import Communicator
from penstock.runtime.transport.mpi import MpiTransport
from penstock.trace import Tensor, Trace
import penstock.planning.explain, penstock.planning.observed, penstock.planning.observed
transport = MpiTransport()
trace = Trace("toy", "cpu", 1, "float32", 1e-3, tuple(Tensor(name, 5000, 1e-3) for name in "dcba"))
planning = Planning(measure_seconds=0.5, measurements=False)
plan = plan_over(transport, "mpi", trace, None, planning).plan
exchange = Exchange(Communicator(transport))
exchange.follow(plan)
exchange.begin()
for bucket in plan.buckets:
    values = np.full(5000 * len(bucket.tensors), 1.0 + transport.rank, np.float32)
    exchange.wait(exchange.start(exchange.bucket(bucket.tensors, [5000] * len(bucket.tensors)), values))
    assert (values == 1.5).all()
exchange.close()
print("ok", plan.hash)
"""
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun on PATH (pip install penstock[mpi])")
def test_ranks_of_mpi_measure_plan_and_exchange_without_torch() -> None:
    launch = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", "PYTHONPATH"]
    for _ in range(5):
        command = [*launch, sys.executable, "-c", WITHOUT_TORCH]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if "FitError" not in done.stderr:  # a busy machine, on all ranks alike
            break
    said = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert len(said) == 2, done.stderr
    assert said[0] == said[1]
