"""What each rank of a wrapper test over MPI does: `mpirun ... python torch_mpi_worker.py STORE`; prints `ok RANK`.

All ranks are in a gloo group too, so both engines train in the same processes and their results are compared here.
"""

import os
import sys
import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import torch_compressed as compressed
import torch_split as split
import torch_training as training
from penstock.errors import MismatchError, PlanError
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch import comm_hook
from penstock.trace import Tensor, Trace

WORLD = MPI.COMM_WORLD
TRACE = Trace("echo", "cpu", 1, "float32", 1e-3, (Tensor("second", 20, 1e-3), Tensor("first", 37, 1e-3)))
ONE_BUCKET = {"planner": "single", "trace": TRACE}  # from the first iteration on, so that nothing travels otherwise
SAME_ORDER = {  # the same programs, so the same sums in the same order, whatever carries the messages
    "ring": {"strategy": "ring"},
    "after the backward pass": {"strategy": "recursive_doubling", "planner": "naive"},
    "momentum": {"strategy": "ring", "momentum": 0.9, "codec": "gtopk", "density": 0.1},
    "onebit": {"strategy": "ring", "codec": "onebit"},
    "gtopk": {"strategy": "gtopk", "codec": "gtopk", "density": 0.1},
    "gtopk by doubling": {"strategy": "gtopk_doubling", "codec": "gtopk", "density": 0.1, "dense_below": 25},
}


def same_as_gloo() -> None:
    """Parameters are those of the gloo run to the bit, and the same number of bytes was sent."""
    for options in SAME_ORDER.values():
        ours, theirs = (
            compressed.echo(WORLD.rank, {"it": {**ONE_BUCKET, **options, "engine": engine}})["it"]
            for engine in ("mpi", None)
        )
        np.testing.assert_array_equal(ours["applied"], theirs["applied"])
        np.testing.assert_array_equal(ours["owed"], theirs["owed"])
        assert ours["plan"].hash == theirs["plan"].hash
        assert ours["sent"][1] == theirs["sent"][1]


def same_on_all_ranks() -> None:
    """MPI's own all-reduce, in float32 and where it has no such numbers; ranks are alike to the bit."""
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.5), ("float16", 0.1)):
        options = {"strategy": "native", "engine": "mpi", "dtype": dtype}
        found = compressed.echo(WORLD.rank, {"it": options}, steps=4)["it"]
        applied = WORLD.allgather(found["applied"])
        assert all(np.array_equal(each, applied[0]) for each in applied)
        wanted = sum(
            compressed.echo_inputs(rank, step).numpy() for rank in range(WORLD.size) for step in range(4)
        ) / np.float32(WORLD.size)
        np.testing.assert_allclose(applied[0], wanted, rtol=0, atol=tolerance)


def nothing_through_torch() -> None:
    """Not one gradient goes through the process group's own all-reduce, from the first iteration on."""
    called = []
    original = dist.all_reduce
    dist.all_reduce = lambda *arguments, **options: called.append(1) or original(*arguments, **options)
    try:
        compressed.echo(WORLD.rank, {"it": {"strategy": "native", "engine": "mpi"}}, steps=4)
    finally:
        dist.all_reduce = original
    assert not called


def measured() -> None:
    """The network of MPI is measured over MPI, and kept under its name."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"profile_iterations": 2, "measure_seconds": 0.3, "measurements": folder}
        wrapper = OurDDP(training.plain(), engine="mpi", **options)
        training._train_few(wrapper, WORLD.rank)
        assert WORLD.rank or [name.startswith("network-mpi-3-") for name in os.listdir(folder)] == [True]
    network = wrapper.decision.network
    assert "native" in network.all_reduce
    assert all(each == network for each in WORLD.allgather(network))


def bare_hook() -> None:
    """torch's own wrapper, with our hook over MPI: what torch alone computes."""
    plain = training.train_without_hook(WORLD.rank)["state"]
    torch.manual_seed(1)
    wrapper = torch.nn.parallel.DistributedDataParallel(training.plain())
    wrapper.register_comm_hook(*comm_hook("ring", engine="mpi"))
    for name, value in training._train_few(wrapper, WORLD.rank)["state"].items():
        np.testing.assert_allclose(value, plain[name], rtol=1e-5, atol=1e-6)


def next_forward() -> None:
    """The next-forward wrapper ends where it does over gloo, to the bit, with a plan of several routes."""
    ours, theirs = (
        split.states(module, wrapper)
        for wrapper, module in (split.by_split(WORLD.rank, plan=split.plan(), engine=name) for name in ("mpi", None))
    )
    for kind in ("weights", "owed"):
        for name, value in ours[kind].items():
            np.testing.assert_array_equal(value, theirs[kind][name])


def refusals() -> None:
    """A group that is not MPI's world, other hooks and unknown engines are refused, on every rank."""
    some = dist.new_group([0, 1])
    if WORLD.rank < 2:
        with pytest.raises(MismatchError, match="rank 0 of 2 in the process group is rank 0 of 3 in MPI; start all"):
            OurDDP(training.plain(), engine="mpi", process_group=some)
    with pytest.raises(PlanError, match="engine 'mpi' needs the hook for itself"):
        OurDDP(training.plain(), engine="mpi").register_comm_hook(None, training._watch)
    with pytest.raises(PlanError, match="no engine called 'tcp'; wanted 'mpi', or None"):
        comm_hook(engine="tcp")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=WORLD.rank, world_size=WORLD.size)
    for case in (same_as_gloo, same_on_all_ranks, nothing_through_torch, measured, bare_hook, next_forward, refusals):
        case()
    print(f"ok {WORLD.rank}", flush=True)
    dist.barrier()
