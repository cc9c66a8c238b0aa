"""Identical gradients in, identical averaged bits out, in every framework and over every engine."""

from functools import cache
from importlib.util import find_spec

import pytest

from adaptor.frameworks import CASES, STEPS, run_workers

WORKERS = {  # by framework; each prints `bits` as worker_torch.py does
    "base": ("worker_session.py",),
    "tensorflow": ("worker_tensorflow.py", "bits"),
    "jax": ("worker_jax.py", "bits"),
}


@cache
def reference(world_size: int) -> dict[str, list[str]]:
    """What PyTorch's adaptor averages, the same on all its ranks."""
    found = [each["bits"] for each in run_workers(world_size, "worker_torch.py")]
    assert all(each == found[0] for each in found)
    assert all(len(set(found[0][case])) == STEPS for case in CASES)  # no step is another's
    return found[0]


@pytest.mark.parametrize(
    "framework",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("base", "tensorflow") else name for name in WORKERS],
)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_averages_are_those_of_pytorch_to_the_bit(framework, world_size):
    if framework != "base" and ((spec := find_spec(framework)) is None or spec.origin is None):  # but for tests/jax
        pytest.skip(f"{framework} is not installed")
    for found in run_workers(world_size, *WORKERS[framework]):
        assert found["bits"] == reference(world_size)


def test_the_averages_are_the_same_over_mpi():
    found = run_workers(2, *WORKERS["base"], engine="mpi")
    assert [each["engine"] for each in found] == ["mpi", "mpi"]
    assert all(each["bits"] == reference(2) for each in found)
