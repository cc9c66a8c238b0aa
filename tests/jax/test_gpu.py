"""Gradients on a GPU: copied to the host and back, with the same bits as there.

Needs jax with CUDA and torch, no optax: `JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu -s tests/jax/test_gpu.py`.
Without numba codecs are left out. The last test prints what copies take.
"""

from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("jax.numpy") is None:  # tests/jax is no such thing
    pytest.skip("penstock.jax needs penstock[jax]", allow_module_level=True)

import jax
import jax.numpy as jnp

from adaptor.frameworks import CASES, run_workers
from adaptor.worlds import run_worlds
from penstock.jax.average import GradientAverage
from penstock.plan import Bucket, Plan

pytestmark = pytest.mark.gpu
SHAPES = {"first": (64, 32), "second": (32,)}


@cache
def gpu():
    found = [each for each in jax.devices() if each.platform == "gpu"]
    if not found:
        pytest.skip("no GPU, or JAX_PLATFORMS leaves it out")
    return found[0]


def given(step):
    generator = np.random.default_rng(step)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize("codec", [None, "onebit"])
def test_what_is_applied_and_owed_is_what_was_given(codec, watch):
    """One rank: a program of another one on the same GPU would wait behind it."""
    if codec is not None:
        pytest.importorskip("numba")
    buckets = (Bucket(("second", "first"), 4 * (64 * 32 + 32), "ring", codec),)
    plan, device = Plan("model", 1, "exact", buckets), gpu()

    def rank(world):
        average = GradientAverage(world, {"plan": plan, "codec": codec})
        weights = jax.device_put({name: jnp.zeros(shape) for name, shape in SHAPES.items()}, device)

        @jax.jit
        def step(state, given):
            def loss(weights):
                marked = average.watch(weights, state) if watch else weights
                return sum((marked[name] * given[name]).sum() for name in given)

            return average.update(jax.grad(loss)(weights), state)

        state, applied = average.init(weights), dict.fromkeys(SHAPES, 0.0)
        for number in range(4):
            averages, state = step(state, given(number))
            applied = {name: applied[name] + np.asarray(averages[name], np.float64) for name in SHAPES}
        assert {each.platform for each in averages["first"].devices()} == {"gpu"}
        return applied, jax.tree.map(np.asarray, state.residual) or dict.fromkeys(SHAPES, 0.0)

    ((applied, owed),) = run_worlds(1, rank)
    for name in SHAPES:
        wanted = sum(given(number)[name].astype(np.float64) for number in range(4))
        np.testing.assert_allclose(applied[name] + owed[name], wanted, atol=1e-4)


def test_given_gradients_have_the_bits_of_a_session_on_the_host():
    """Two ranks are two processes that share the GPU; torch carries their messages."""
    gpu()
    pytest.importorskip("torch")
    wanted = run_workers(2, "worker_session.py")[0]["bits"]
    for found in run_workers(2, "worker_jax.py", "gpu", "bits"):
        assert found["platform"] == "gpu"
        assert found["bits"] == wanted
    assert set(wanted) == set(CASES)


def test_how_long_copies_take_is_printed(capsys):
    gpu()
    (found,) = run_workers(1, "worker_jax.py", "gpu", "copies")
    with capsys.disabled():
        print(f"\n10M parameters on {found['platform']}, one rank, ms for one update: {found['copies']}")
    assert {"dense", "session", "moved"} <= set(found["copies"])
