"""Ranks of JAX that are processes: what they learn, and what they are told when one of them dies."""

import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from adaptor.frameworks import run_workers, worker_outcomes

if find_spec("jax.numpy") is None:  # tests/jax is no such thing
    pytest.skip("penstock.jax needs penstock[jax]", allow_module_level=True)

NOISE = 0.05  # of a loss: what onebit may differ by from dense


@cache
def learned(world_size: int) -> list[dict]:
    return [each["training"] for each in run_workers(world_size, "worker_jax.py", "training")]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("codec", ["dense", "onebit", "gtopk"])
def test_after_200_steps_all_ranks_have_the_same_bits(world_size, codec):
    assert len({each[codec][1] for each in learned(world_size)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_are_those_of_pmean_over_devices(world_size):
    (wanted,) = [each["pmean"] for each in run_workers(1, "worker_jax.py", "pmean", str(world_size))]
    dense, onebit, gtopk = (learned(world_size)[0][name][0] for name in ("dense", "onebit", "gtopk"))
    assert dense == pytest.approx(wanted, rel=2e-3)
    for compressed in (onebit, gtopk):
        assert sum(compressed[-50:]) / 50 == pytest.approx(sum(wanted[-50:]) / 50, abs=NOISE)
        assert sum(compressed[-50:]) < 0.5 * sum(compressed[:50])


@pytest.mark.slow
def test_a_process_that_dies_is_named_by_the_others():
    outcomes = worker_outcomes(3, "worker_jax.py", "dies")
    assert outcomes[1][1] == 7
    for found, code, error in (outcomes[0], outcomes[2]):
        assert code == 0, error
        assert "TransportError" in found["dies"]
        assert "rank 1" in found["dies"]


@pytest.mark.slow
def test_the_example_trains_under_torchrun():
    script = Path(__file__).parents[2] / "examples" / "train_jax.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "learned the circle\n", result.stderr


PAGE = (Path(__file__).parents[2] / "docs" / "jax.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=["plain", "flax"])
def test_the_python_of_the_page_runs(block):
    if "flax" in block:
        pytest.importorskip("flax")
    result = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout
