"""penstock for JAX: gradients averaged over all ranks inside `jit`, by the same exchange as in PyTorch.

import penstock.jax as pk

pk.init()                                            # ranks of torchrun, mpirun or Slurm
optimizer = optax.chain(pk.average_gradients(codec="onebit"), optax.adam(1e-3))
parameters = pk.broadcast(parameters)                # rank 0's
"""

from typing import Any

import numpy as np

from penstock.errors import PlanError, naming_extra

with naming_extra():
    import jax

from penstock.adaptor import current
from penstock.adaptor.current import init, is_initialized, local_rank, local_size, rank, size
from penstock.exchange.compression import Compression
from penstock.exchange.traffic import Traffic
from penstock.jax.average import AverageState, GradientAverage, made, redistribute_states
from penstock.planning.planning import Planning
from penstock.timeline import Timeline

__all__ = [
    "AverageState",
    "GradientAverage",
    "average_gradients",
    "broadcast",
    "bytes_sent",
    "explain",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "measured_timeline",
    "rank",
    "redistribute",
    "shutdown",
    "size",
    "watch",
]


def shutdown() -> None:
    """Leave, all ranks together; at the end of a process this need not be called."""
    for each in made.copy():
        each.close()
    current.shutdown()


def average_gradients(
    codec: Any = None,
    plan: Any = None,
    *,
    compression: Compression | None = None,
    planning: Planning | None = None,
    on_nonfinite: str = "raise",
    **options: Any,
) -> GradientAverage:
    """Return a transformation of optax that averages gradients over all ranks; it works inside of `jit`.

    codec, plan, compression, planning, and the fields of these two as keywords (density, strategy, planner, network,
    ...) mean what they do in `penstock.torch.DistributedDataParallel`. Put it first into `optax.chain`. `init` of the
    optimizer compares the ranks; all of them must call it. `close()` of what is returned, on all ranks together, gives
    its memory and threads back; `shutdown` does so for all.
    """
    given = {"codec": codec, "plan": plan, "compression": compression, "planning": planning}
    options |= {name: value for name, value in given.items() if value is not None}
    made.append(GradientAverage(current.world(), options | {"on_nonfinite": on_nonfinite}))
    return made[-1]


def watch(parameters: Any, state: Any = None) -> Any:
    """Return the same parameters, marked: their gradients are sent layer by layer while the backward pass goes on.

    Use it inside of the function that is differentiated, with the optimizer's state; it stands for
    `watch` of the `average_gradients` that was made last.
    """
    return _last().watch(parameters, state)


def broadcast(tree: Any, root: int = 0) -> Any:
    """Return the arrays of one rank on all ranks, for any pytree; call it outside of `jit`."""
    leaves, shape = jax.tree.flatten(tree)
    found = current.world().broadcast([np.asarray(each) for each in leaves], root)
    places = map(_place_of, leaves)
    return jax.tree.unflatten(shape, [jax.device_put(one, place) for one, place in zip(found, places, strict=True)])


def redistribute(states: list[Any]) -> Any:
    """Return what this rank starts from, given the optimizer's states of all ranks that there were, in their order.

    What is owed is dealt out so that its sum stays what it was, whatever the number of ranks is now.
    """
    return redistribute_states(states, rank(), size())


def explain(picture: bool = False) -> str:
    """Say what was planned and why, for the `average_gradients` that was made last."""
    return _last().session.explain(picture)


def bytes_sent() -> Traffic:
    """Return the bytes that this rank has sent so far, and what the same gradients take dense."""
    return _last().session.bytes_sent()


def measured_timeline() -> Timeline | None:
    """Return the last step as it was on this rank: computation, and each bucket on the wire."""
    return _last().session.measured_timeline()


def _last() -> GradientAverage:
    if not made:
        raise PlanError("no transformation yet; call penstock.jax.average_gradients() first")
    return made[-1]


def _place_of(leaf: Any) -> Any:
    return leaf.sharding if isinstance(leaf, jax.Array) else None
