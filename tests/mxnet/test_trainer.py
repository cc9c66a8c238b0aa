"""Gluon's trainer over the exchange; `make test-mxnet` runs this in MXNet's own environment."""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from adaptor.frameworks import CASES, HERE, STEPS, quiet, run_workers

if (spec := find_spec("mxnet")) is None or spec.origin is None:  # without a file: tests/mxnet
    pytest.skip("MXNet 1.9.1 has an environment of its own: make test-mxnet", allow_module_level=True)
NOISE = 0.05  # of a loss: what a codec may differ by from dense
WORKER = HERE / "worker_mxnet.py"


@cache
def found(world_size: int) -> list[dict]:
    """Return what each rank finds; MXNet is imported once for all checks."""
    return run_workers(world_size, "worker_mxnet.py", engine="mpi")


def of(check: str, world_size: int = 2) -> list:
    """What a check returned on each rank; what went wrong in it is raised here."""
    results = [each[check] for each in found(world_size)]
    for rank, each in enumerate(results):
        assert not (isinstance(each, dict) and "failed" in each), f"rank {rank}: {each['trace']}"
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_given_gradients_have_the_bits_of_a_session(world_size):
    """A session has those of PyTorch: tests/adaptor/test_equal_bits.py compares them."""
    wanted = run_workers(world_size, "worker_session.py", engine="mpi")[0]["bits"]
    assert all(len(set(wanted[case])) == STEPS for case in CASES)
    assert of("bits", world_size) == [wanted] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("codec", ["dense", "onebit", "gtopk"])
def test_after_200_steps_all_ranks_have_the_same_bits(world_size, codec):
    assert len({each[codec][1] for each in of("training", world_size)}) == 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_are_those_of_mxnets_own_kvstore(world_size):
    losses = {name: each[0] for name, each in of("training", world_size)[0].items()}
    assert losses["dense"] == pytest.approx(losses["kvstore"], rel=2e-3)
    for compressed in (losses["onebit"], losses["gtopk"]):
        assert sum(compressed[-50:]) / 50 == pytest.approx(sum(losses["kvstore"][-50:]) / 50, abs=NOISE)
        assert sum(compressed[-50:]) < 0.5 * sum(compressed[:50])


CHECKS = {
    "sums_in_every_type": "sums over ranks are exact in seven types, in new arrays and in place",
    "averages": "averages, and of integers as Horovod rounds",
    "other_ops": "min, max and product",
    "factors": "factors before and after",
    "groups": "arrays of several types in one group",
    "rows_of_all": "rows are gathered whatever their number",
    "broadcasts": "every rank may be the root, in seven types",
    "parameters_of_the_root": "parameters with and without values, and arrays",
    "objects": "any Python value",
    "two_trainers": "two models in one program",
    "models_averaged_now_and_then": "weights are averaged in place",
    "half_on_the_wire": "Compression.fp16 leaves types as they were",
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("check", list(CHECKS))
def test_it_does_what_horovod_does(check, world_size):
    of(check, world_size)


def test_ranks_that_bring_different_things_are_told_the_same():
    first, second = of("mismatches")
    assert first == second
    for text, wanted in zip(
        first,
        [
            "rank 0 brings (3,) of float32, rank 1 (4,) of float32",
            "rank 1 (3,) of int32",
            "rows of (3,) of float32, rank 1 all-gather of rows of (4,)",
            "rows of () of float32, rank 1 all-gather of rows of () of int32",
            "rank 0 brings (3,) of float32, rank 1 (4,) of float32",
            "rank 1 (3,) of int32",
            "rank 0 calls broadcast from rank 0, rank 1 broadcast from rank 1",
        ],
        strict=True,
    ):
        assert wanted in text


def test_what_horovods_scripts_hand_over_has_its_meaning_or_an_answer():
    first, second = of("horovods_arguments")
    assert first == second
    assert "num_groups= has no effect" in first[0]
    assert "PlanError: op='sum'; wanted Average" in first[1]
    assert "PlanError: process_set='some'; wanted none" in first[2]
    assert first[3] == "TypeError: unexpected keyword argument 'names'"
    assert "penstock.mxnet has no DistributedOptimizer, which Horovod has; use DistributedTrainer" in first[4]
    assert "penstock.mxnet has no reducescatter, which Horovod has" in first[5]


def test_auto_plans_and_the_trainer_says_what_came_of_it():
    for each in of("plans"):
        assert "by ring+onebit on 2 workers" in each["explained"]
        assert each["routes"] == ["ring+onebit"]
        assert each["saved"]
        assert each["drawn"]
        assert each["lanes"] == ["compute", "network"]


def test_dense_nan_reaches_all_ranks_as_with_any_all_reduce():
    assert of("dense_nan") == [True, True]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (
            "different_models",
            "PlanError: parameter 0 is 'layer_bias', (2,) of float32 on rank 0 and 'layer_weight', (2, 3)",
        ),
        ("sparse", "MismatchError: rank 1: the gradient of 'embedding_weight' is row_sparse; wanted a dense one"),
        ("stale", "PlanError: rank 1: no new gradient of 'unused_bias' since the last step; give parameters that are"),
        ("without_values", "PlanError: parameter 'layer_bias' has no values; call initialize() first"),
        ("nan", "NonFiniteError: the gradient of 'layer_"),
    ],
)
def test_what_goes_wrong_is_one_error_on_all_ranks(wrong, complaint):
    for each in of("errors"):
        assert complaint in each[wrong]


def test_a_rank_that_dies_is_named_on_all_others():
    options = ["--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe", "-n", "3"]
    done = run_under_mpirun([*options, sys.executable, str(WORKER), "dies"])
    told = {each["rank"]: each["dies"] for each in map(json.loads, filter(None, done.stdout.splitlines()))}
    assert sorted(told) == [0, 2], done.stderr
    for text in told.values():
        assert "TransportError" in text
        assert "rank 1 died" in text


def run_under_mpirun(command: list[str]) -> subprocess.CompletedProcess[str]:
    mpirun = Path(sys.executable).parent / "mpirun"
    return subprocess.run(
        [mpirun, *command], capture_output=True, text=True, check=False, timeout=200, env=quiet(os.environ)
    )


def test_the_example_trains_on_one_rank_and_under_mpirun():
    examples = Path(__file__).parents[2] / "examples"
    mpirun = [Path(sys.executable).parent / "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    for launcher, script in (([], "train_mxnet_before.py"), ([], "train_mxnet.py"), (mpirun, "train_mxnet.py")):
        command = [*launcher, sys.executable, examples / script]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.stdout == (examples / script).with_suffix(".out").read_text(), result.stderr
