"""Learn a circle with JAX and optax on all ranks: `torchrun --nproc-per-node 2 examples/train_jax.py`.

`train_jax_before.py` beside it is the same script for one process.
"""

import jax
import jax.numpy as jnp
import optax

import penstock.jax as pk  # new

STEPS = 300

pk.init()  # new: the ranks that torchrun, mpirun or Slurm started
keys = jax.random.split(jax.random.key(0), 2)
parameters = [
    {"weight": jax.random.normal(keys[0], (2, 64)), "bias": jnp.zeros(64)},
    {"weight": jax.random.normal(keys[1], (64, 1)) / 8, "bias": jnp.zeros(1)},
]
parameters = pk.broadcast(parameters)  # new: those of rank 0
optimizer = optax.chain(pk.average_gradients(), optax.sgd(0.5, momentum=0.9))  # was: optax.sgd(0.5, momentum=0.9)
state = optimizer.init(parameters)


def predicted(layers, points):
    """Return a number for each point: more than 0 inside of the circle."""
    hidden = jax.nn.relu(points @ layers[0]["weight"] + layers[0]["bias"])
    return (hidden @ layers[1]["weight"] + layers[1]["bias"])[:, 0]


@jax.jit
def step(parameters, state, key):
    """Return parameters and state after one batch."""
    points = jax.random.uniform(key, (64, 2), minval=-1, maxval=1)
    inside = (points**2).sum(1) < 0.5

    def loss(layers):
        layers = pk.watch(layers, state)  # new: gradients are sent while others are still computed
        return optax.sigmoid_binary_cross_entropy(predicted(layers, points), inside).mean()

    gradients = jax.grad(loss)(parameters)
    updates, state = optimizer.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state


for key in jax.random.split(jax.random.key(1 + pk.rank()), STEPS):  # was: key(1)
    parameters, state = step(parameters, state, key)
points = jax.random.uniform(jax.random.key(2), (1000, 2), minval=-1, maxval=1)
right = ((predicted(parameters, points) > 0) == ((points**2).sum(1) < 0.5)).mean()
if pk.rank() == 0:  # new
    print("learned the circle" if right > 0.95 else f"only {100 * right:.0f}% right")
