"""What a rank of JAX does, inside of compiled programs: `worker_jax.py CHECK ...` (`frameworks.py`)."""

import hashlib
import os
import sys
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

if "gpu" in sys.argv:  # before jax looks for devices
    os.environ |= {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # `quiet` hides them
if "pmean" in sys.argv:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[-1]}"

import jax
import jax.numpy as jnp
import numpy as np

import penstock.jax as pk
from adaptor.frameworks import CASES, SHAPES, STEPS, digest, gradients, plan_of, report
from penstock.adaptor import current
from penstock.adaptor.buckets import Gradient
from penstock.adaptor.session import Session
from penstock.plan import Bucket, Plan

TRAINING_STEPS, BATCH, FEATURES = 200, 30, 12


def averaged(case: str) -> list[str]:
    """Return a digest of what each step averages to."""
    average = pk.average_gradients(plan=plan_of(case, pk.size()))
    weights = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}

    @jax.jit
    def step(state: Any, given: Any) -> Any:
        gradient = jax.grad(partial(loss_of, state, given))(weights)
        return average.update(gradient, state)

    def loss_of(state: Any, given: Any, weights: Any) -> Any:
        marked = average.watch(weights, state)
        return sum((marked[name] * given[name]).sum() for name in given)

    state, found = average.init(weights), []
    for number in range(STEPS):
        averages, state = step(state, gradients(pk.rank(), number))
        found.append(digest({name: np.asarray(each) for name, each in averages.items()}))
        if number == 0:
            average.session.state_dict()
    return found


def batches(steps: int) -> Any:
    """Return the data of all ranks, the same on each."""
    generator = np.random.default_rng(0)
    for _ in range(steps):
        x = generator.standard_normal((BATCH, FEATURES)).astype(np.float32)
        yield x, np.tanh(x[:, :2].sum(1, keepdims=True))


def network() -> Any:
    """Return weights, different on each rank until they are broadcast."""
    keys = jax.random.split(jax.random.key(pk.rank()), 2)
    shapes = zip(keys, ((FEATURES, 16), (16, 1)), strict=True)
    return [{"b": jnp.zeros(shape[1]), "w": jax.random.normal(key, shape) / 3} for key, shape in shapes]


def loss(layers: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ layers[0]["w"] + layers[0]["b"])
    return ((hidden @ layers[1]["w"] + layers[1]["b"] - y) ** 2).mean()


def learned(**options: Any) -> tuple[list[float], str]:
    """Return losses over all data, and a digest of the weights, after training on this rank's part of it."""
    import optax  # not needed for other checks, nor installed with every GPU

    optimizer = optax.chain(pk.average_gradients(measure_seconds=1.0, **options), optax.sgd(0.05))
    layers = pk.broadcast(network())
    state, losses = optimizer.init(layers), []

    @jax.jit
    def step(layers: Any, state: Any, x: Any, y: Any) -> Any:
        gradient = jax.grad(lambda layers: loss(pk.watch(layers, state), x, y))(layers)
        updates, state = optimizer.update(gradient, state, layers)
        return optax.apply_updates(layers, updates), state

    for x, y in batches(TRAINING_STEPS):
        layers, state = step(layers, state, x[pk.rank() :: pk.size()], y[pk.rank() :: pk.size()])
        losses.append(float(loss(layers, x, y)))
    weights = b"".join(np.asarray(each).tobytes() for each in jax.tree.leaves(layers))
    return losses, hashlib.sha256(weights).hexdigest()[:16]


def training() -> dict[str, Any]:
    """Return what is learned with and without a codec."""
    codecs = {"dense": {}, "onebit": {"codec": "onebit"}, "gtopk": {"codec": "gtopk", "density": 0.25}}
    return {name: learned(**options) for name, options in codecs.items()}


def pmean() -> list[float]:
    """Return the losses of the same training by JAX's own data parallelism, on several devices of one process."""
    import optax

    devices, optimizer = jax.devices(), optax.sgd(0.05)

    def step(layers: Any, state: Any, x: Any, y: Any) -> Any:
        gradient = jax.lax.pmean(jax.grad(loss)(layers, x, y), "ranks")
        updates, state = optimizer.update(gradient, state, layers)
        return optax.apply_updates(layers, updates), state

    together, layers = jax.pmap(step, axis_name="ranks", devices=devices), network()
    spread = jax.tree.map(lambda each: jnp.stack([each] * len(devices)), (layers, optimizer.init(layers)))
    losses = []
    for x, y in batches(TRAINING_STEPS):
        parts = (np.stack([each[rank :: len(devices)] for rank in range(len(devices))]) for each in (x, y))
        spread = together(*spread, *parts)
        losses.append(float(loss(jax.tree.map(lambda each: each[0], spread[0]), x, y)))
    return losses


def dies() -> str:
    """Rank 1 dies in step 3; return what the others are told."""
    average = pk.average_gradients()
    layers = pk.broadcast(network())
    state = average.init(layers)
    step = jax.jit(lambda state, x, y: average.update(jax.grad(loss)(layers, x, y), state))
    for number, batch in enumerate(batches(6)):
        if (pk.rank(), number) == (1, 3):
            os._exit(7)
        try:
            _, state = jax.block_until_ready(step(state, *batch))
        except jax.errors.JaxRuntimeError as error:
            return str(error)
    return "nothing was raised"


def copies() -> dict[str, float]:
    """Return milliseconds for the averages of 10M parameters, and those of a session on the host beside it.

    What the first take more is copies from and to the device, and calls; `moved` is the copies alone.
    """
    shape, layers = (1125, 1125), 8
    plans = {
        codec: Plan(
            "copies",
            pk.size(),
            "exact",
            tuple(Bucket((str(index),), 4 * shape[0] * shape[1], "ring", codec) for index in range(layers)),
        )
        for codec in (None, "onebit")
    }
    gradients = [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), layers)]
    found = {}
    for name, codec in (("dense", None), *((each, each) for each in CASES if each == "onebit")):
        average = pk.average_gradients(plan=plans[codec])
        state, step, taken = average.init(gradients), jax.jit(average.update), []
        for _ in range(8):
            start = perf_counter()
            _, state = jax.block_until_ready(step(gradients, state))
            taken.append(1e3 * (perf_counter() - start))
        found[name] = round(median(taken[3:]), 1)
    session = Session(
        current.world(), [Gradient(str(index), shape, "float32") for index in range(layers)], plan=plans[None]
    )
    taken, given = [], [np.asarray(each) for each in gradients]
    for _ in range(8):
        start = perf_counter()
        for index, each in enumerate(given):
            session.put(index, each)
        session.wait()
        taken.append(1e3 * (perf_counter() - start))
    found["session"], taken = round(median(taken[3:]), 1), []
    for _ in range(8):
        start = perf_counter()
        here = [np.asarray(each) for each in jax.block_until_ready([each + 0 for each in gradients])]
        jax.block_until_ready(jax.device_put(here, jax.devices()[0]))
        taken.append(1e3 * (perf_counter() - start))
    return found | {"moved": round(median(taken[3:]), 1)}


def bits() -> dict[str, list[str]]:
    """Return digests of all cases."""
    return {case: averaged(case) for case in CASES}


CHECKS = {check.__name__: check for check in (bits, training, pmean, dies, copies)}

if __name__ == "__main__":
    pk.init()
    found = {name: CHECKS[name]() for name in sys.argv[1:] if name in CHECKS}
    report(pk.rank(), platform=jax.default_backend(), **found)
    if "dies" in sys.argv:
        os._exit(0)  # after a failure gloo's own shutdown may wait for ranks that are gone
    pk.shutdown()
