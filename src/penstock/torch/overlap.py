"""Bulk-synchronous SGD in the three forms of Wang et al. (section 3.3), and a fourth that overlaps more.

    bsp = BulkSynchronous(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), algorithm="all_reduce")
    for inputs, targets in data:
        loss_function(bsp(inputs), targets).backward()
        bsp.step()                          # communicates and updates; gradients are gone afterwards
    bsp.finish()                            # before weights are read or compared; state_dict() does so

| algorithm | | what travels | when |
| --- | --- | --- | --- |
| `reduce_broadcast` | Alg. 2 | gradients to rank 0, which updates; weights to all ranks | after the backward pass |
| `all_reduce` | Alg. 3 | gradients to all ranks, which all update; weights from rank 0 every 5 steps | after it |
| `layers` | Alg. 1 | as Alg. 2, layer by layer | gradients during backward, weights during the next forward pass |
| `split` | ours | an all-reduce per layer, in two halves | one during backward, one during the next forward pass |

All of them compute what plain data parallelism computes. Parameters may have no gradient, on some ranks or on all. Each
rank's buffers stay its own. Schedulers take `bsp.optimizers`, one or one for each layer, and are stepped after
`bsp.step()`; in the algorithms that update on rank 0 only, their state is there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import PlanError
from penstock.runtime.communicator import Communicator
from penstock.runtime.transport.c10d import C10dTransport
from penstock.strategies import names
from penstock.torch.engines import own_group
from penstock.torch.hook import TIMEOUT_SECONDS
from penstock.torch.layered import Layers, Split
from penstock.torch.synchronous import Algorithm, AllReduce, MakeOptimizer, ReduceBroadcast, Sender

ALGORITHMS: dict[str, type[Algorithm]] = {
    "reduce_broadcast": ReduceBroadcast,
    "all_reduce": AllReduce,
    "layers": Layers,
    "split": Split,
}
OPERATIONS = ("reduce", "broadcast", "all_reduce", "reduce_scatter", "all_gather")


class BulkSynchronous(torch.nn.Module):
    """A module that is trained by one of the algorithms above; `make_optimizer` is called per layer where layered."""

    def __init__(
        self,
        module: torch.nn.Module,
        make_optimizer: MakeOptimizer,
        algorithm: str = "split",
        strategy: str = "",
        resync_every: int = 5,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if algorithm not in ALGORITHMS:
            raise PlanError(f"no algorithm called {algorithm!r}; wanted one of {', '.join(ALGORITHMS)}")
        if strategy and not any(strategy in names(operation) for operation in OPERATIONS):
            known = sorted({name for operation in OPERATIONS for name in names(operation)})
            raise PlanError(f"no strategy called {strategy!r}; wanted one of {', '.join(known)}")
        if resync_every < 1:
            raise PlanError(f"resync_every is {resync_every}; wanted at least 1")
        self.module = module
        group = process_group or dist.group.WORLD
        if group is None:
            raise PlanError("no process group; call torch.distributed.init_process_group first")
        chosen = ALGORITHMS[algorithm]
        ours = [own_group(group) for _ in range(chosen.lanes)]
        sender = Sender([Communicator(C10dTransport(each, parent=group), TIMEOUT_SECONDS) for each in ours])
        self._algorithm = chosen(module, make_optimizer, sender, strategy, resync_every)
        self._algorithm.begin()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; with overlap, each layer waits for its own weights only."""
        return self.module(*inputs, **kwargs)

    def step(self) -> None:
        """Exchange gradients and update weights, or start to, and forget the gradients."""
        self._algorithm.step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes add up gradients and send nothing: all but the last before a step."""
        self._algorithm.sends = False
        try:
            yield
        finally:
            self._algorithm.sends = True

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """What updates the weights."""
        return self._algorithm.every_optimizer()

    def finish(self) -> None:
        """Wait until this rank's weights are those of the last step."""
        self._algorithm.finish()

    def close(self) -> None:
        """Finish, remove all hooks and end the communication thread."""
        self._algorithm.close()
