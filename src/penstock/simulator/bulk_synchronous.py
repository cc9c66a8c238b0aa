"""Times the three BSP-SGD algorithms of Wang et al. (section 3.3) on one trace, in the steady state.

Without overlap (Algorithms 2 and 3) an iteration is computation, then communication. With overlap (Algorithm 1) the
gradients of a layer are reduced during the backward pass of the layers below it, and its weights are broadcast during
the forward pass of the layers before it; an iteration then begins before the last one's weights have all arrived, so
several are simulated in a row and the distance between two of them counts.

    compute  |F1 F2 F3|B3 B2 B1|  |F1 F2 F3|
    network  |b2 b3|      r3 r2 r1 b1 b2 b3|      b: broadcast of weights, r: reduce of gradients

A trace has one forward time for the whole model; a layer's share is taken to be that of its backward time.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.simulator.engine import Task, run_tasks
from penstock.trace import Trace

RESYNC_EVERY = 5  # iterations between two broadcasts of the weights in Algorithm 3
_ITERATIONS = 4  # simulated in a row; the last two are a steady state apart
_COMPUTE, _NETWORK = "compute", "network"


Cost = Callable[[float], float]  # seconds for a number of bytes


@dataclass(frozen=True, slots=True)
class Costs:
    """What the collectives cost."""

    reduce: Cost
    broadcast: Cost
    all_reduce: Cost


def reduce_broadcast_seconds(trace: Trace, costs: Costs) -> float:
    """Return the iteration of Algorithm 2: compute, reduce to the root, broadcast the weights."""
    nbytes = sum(trace.nbytes)
    return trace.compute_seconds + costs.reduce(nbytes) + costs.broadcast(nbytes)


def all_reduce_seconds(trace: Trace, costs: Costs, resync_every: int | None = RESYNC_EVERY) -> float:
    """Return the mean iteration of Algorithm 3: compute, all-reduce, and now and then a broadcast of the weights."""
    nbytes = sum(trace.nbytes)
    resync = costs.broadcast(nbytes) / resync_every if resync_every else 0.0
    return trace.compute_seconds + costs.all_reduce(nbytes) + resync


def layers_seconds(trace: Trace, costs: Costs) -> float:
    """Return the steady iteration of Algorithm 1: reduce during backward, broadcast during the next forward pass."""
    tasks: list[Task] = []
    updates: list[int] = []  # of each iteration, the task after which the root has updated all weights
    for _ in range(_ITERATIONS):
        last = _forward(tasks, trace, costs, updates[-1] if updates else None)
        updates.append(_backward(tasks, trace, costs, last))
    ran = run_tasks(tasks)
    return ran[updates[-1]].end_seconds - ran[updates[-2]].end_seconds


def _forward(tasks: list[Task], trace: Trace, costs: Costs, update: int | None) -> int:
    """Add a forward pass, layer by layer, each after its weights; return its last task."""
    share = trace.forward_seconds / trace.backward_seconds if trace.backward_seconds else 0.0
    before = update
    for tensor, nbytes in reversed(list(zip(trace.tensors, trace.nbytes, strict=True))):
        after = [] if before is None else [before]
        if update is not None:
            tasks.append(Task(costs.broadcast(nbytes), (_NETWORK,), (update,)))
            after.append(len(tasks) - 1)
        tasks.append(Task(share * tensor.backward_seconds, (_COMPUTE,), tuple(after)))
        before = len(tasks) - 1
    assert before is not None  # a trace has at least one tensor
    return before


def _backward(tasks: list[Task], trace: Trace, costs: Costs, before: int) -> int:
    """Add a backward pass, each layer reduced once it is computed; return the update that ends the iteration."""
    reduced = []
    for tensor, nbytes in zip(trace.tensors, trace.nbytes, strict=True):
        tasks.append(Task(tensor.backward_seconds, (_COMPUTE,), (before,)))
        before = len(tasks) - 1
        tasks.append(Task(costs.reduce(nbytes), (_NETWORK,), (before,)))
        reduced.append(len(tasks) - 1)
    tasks.append(Task(0.0, (), tuple(reduced)))
    return len(tasks) - 1
