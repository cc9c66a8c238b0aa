"""Gluon's trainer over the exchange; `make test-mxnet` runs this in MXNet's own environment."""

import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from adaptor.frameworks import CASES, STEPS, run_workers

if (spec := find_spec("mxnet")) is None or spec.origin is None:  # without a file: tests/mxnet
    pytest.skip("MXNet 1.9.1 has an environment of its own: make test-mxnet", allow_module_level=True)
NOISE = 0.05  # of a loss: what onebit may differ by from dense


@cache
def found(world_size: int) -> list[dict]:
    """Return what each rank finds; MXNet is imported once for all checks."""
    return run_workers(world_size, "worker_mxnet.py", "bits", "training", "errors", engine="mpi")


@pytest.mark.parametrize("world_size", [2, 3])
def test_given_gradients_have_the_bits_of_a_session(world_size):
    """A session has those of PyTorch: tests/adaptor/test_equal_bits.py compares them."""
    wanted = run_workers(world_size, "worker_session.py", engine="mpi")[0]["bits"]
    assert all(len(set(wanted[case])) == STEPS for case in CASES)
    for each in found(world_size):
        assert each["bits"] == wanted


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("codec", ["None", "onebit"])
def test_after_200_steps_all_ranks_have_the_same_bits(world_size, codec):
    assert len({each["training"][codec][1] for each in found(world_size)}) == 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_are_those_of_one_process_with_the_whole_batch(world_size):
    alone = found(world_size)[0]["alone"][0]
    dense, onebit = (found(world_size)[0]["training"][codec][0] for codec in ("None", "onebit"))
    assert dense == pytest.approx(alone, rel=2e-3)
    assert sum(onebit[-50:]) / 50 == pytest.approx(sum(alone[-50:]) / 50, abs=NOISE)
    assert sum(onebit[-50:]) < 0.5 * sum(onebit[:50])


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (
            "different_models",
            "PlanError: parameter 0 is 'layer_bias', (2,) of float32 on rank 0 and 'layer_weight', (2, 3)",
        ),
        ("sparse", "MismatchError: rank 1: the gradient of 'embedding_weight' is row_sparse; wanted a dense one"),
        ("stale", "PlanError: rank 1: no new gradient of 'unused_bias' since the last step; give parameters that are"),
        ("without_values", "PlanError: parameter 'layer_weight' has no values yet"),
        ("nan", "NonFiniteError: the gradient of 'layer_"),
    ],
)
def test_what_goes_wrong_is_one_error_on_all_ranks(wrong, complaint):
    for each in found(2):
        assert complaint in each["errors"][wrong]


def test_the_example_trains_on_one_rank_and_under_mpirun():
    script = Path(__file__).parents[2] / "examples" / "train_mxnet.py"
    mpirun = [Path(sys.executable).parent / "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    for launcher in ([], mpirun):
        result = subprocess.run([*launcher, sys.executable, script], capture_output=True, text=True, check=False)
        assert result.stdout == script.with_suffix(".out").read_text(), result.stderr
