"""Algorithms 2 and 3 of Wang et al.: compute, then communicate, then update."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from penstock.adaptor.world import World
from penstock.errors import PenstockError, TransportError
from penstock.runtime.communicator import Communicator
from penstock.runtime.measure_network import measure_links
from penstock.strategies import names, parse_strategy
from penstock.strategies.linear_pipeline import NAME as LINEAR_PIPELINE
from penstock.torch.layers import Layer, Wait, one_layer, staging_for

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
ROOT = 0
OTHERWISE = {"reduce": LINEAR_PIPELINE, "broadcast": LINEAR_PIPELINE, "all_reduce": "ring"}
_MEASURE_SECONDS = 1.0  # links, where a linear pipeline carries gradients or weights


class Sender:
    """Runs collectives one after the other, on a thread of its own, in the order they are given."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.world_size = communicator.transport.rank, communicator.transport.world_size
        self._communicator = communicator
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-bsp")
        self._failure: BaseException | None = None  # the first; all that follows fails because of it

    def start(
        self, operation: str, values: torch.Tensor, after: Wait | None = None, **options: Any
    ) -> "Future[None]":  # fmt: skip
        """Start a collective on `values`, in place; `after` waits until they are there."""
        collective = partial(getattr(self._communicator, operation), values, **options)
        return self._thread.submit(self._run, collective, after)

    def _run(self, collective: Callable[[], None], after: Wait | None) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            if after is not None:
                after()
            collective()
        except BaseException as error:
            if isinstance(error, TransportError) or not isinstance(error, PenstockError):
                self._failure = self._failure or error
            raise self._failure or error from None

    def close(self) -> None:
        """End the thread once it has done what it was given."""
        self._thread.shutdown()


class Algorithm:
    """What the four have in common: the same weights at the start, and nothing to clean up."""

    operations: Sequence[str] = ()  # of every iteration, by the strategy asked for or by `OTHERWISE`

    def __init__(
        self,
        module: torch.nn.Module,
        make_optimizer: MakeOptimizer,
        world: World,
        strategy: str,
        resync_every: int,
        options: dict[str, Any],  # of an exchange
    ) -> None:
        self.module, self.make_optimizer, self.world = module, make_optimizer, world
        self.strategy, self.resync_every, self.options = strategy, resync_every, options
        self.staging = staging_for(module)
        self.sender = Sender(world.communicator)
        self.sends = True  # False in no_sync: gradients only add up

    def begin(self) -> None:
        """Give all ranks rank 0's weights and buffers."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            here = tensor.detach().cpu()  # the same memory where it is there already
            self.sender.start("broadcast", here, root=ROOT).result()
            if tensor.device != here.device:
                tensor.detach().copy_(here)
        self._measure_links()

    def _measure_links(self) -> None:
        """Measure what linear pipelines take their blocks from, where these carry an iteration; all ranks together."""
        used, communicator = {self._by(each)["strategy"] for each in self.operations}, self.world.communicator
        if self.world.size > 1 and LINEAR_PIPELINE in used and not communicator.is_crowded:
            communicator.network = measure_links(communicator.transport, seconds=_MEASURE_SECONDS).network
            communicator.forget_programs()  # some have other blocks now

    def begin_forward(self) -> None:
        """Nothing is noted of forward passes."""

    def step(self) -> None:
        """Exchange gradients and update weights, or start to."""
        raise AssertionError("each algorithm has its own")

    def every_optimizer(self) -> Sequence[torch.optim.Optimizer]:
        """Return the optimizers, one for each layer where layers are updated by themselves."""
        raise AssertionError("each algorithm has its own")

    def finish(self) -> None:
        """Nothing is under way between steps."""

    def close(self) -> None:
        """Finish, and end the communication thread."""
        self.finish()
        self.sender.close()

    def _broadcast(self, layer: Layer) -> None:
        """Send rank 0's packed weights to all ranks, now."""
        self.sender.start("broadcast", layer.flat, root=ROOT, **self._by("broadcast")).result()
        layer.unpack_weights()

    def _by(self, operation: str) -> dict[str, Any]:
        """Return the strategy asked for with its options, where it can do this operation; another one otherwise."""
        name, options = parse_strategy(self.strategy or OTHERWISE[operation])
        name = name.replace("-", "_")
        return {"strategy": name, **options} if name in names(operation) else {"strategy": OTHERWISE[operation]}


class Whole(Algorithm):
    """Treats the module as one layer, with one optimizer."""

    def begin(self) -> None:
        """Start from rank 0's weights."""
        super().begin()
        self.whole = one_layer(self.module, self.staging)
        self.optimizer = self.make_optimizer(self.whole.parameters)

    def every_optimizer(self) -> Sequence[torch.optim.Optimizer]:
        """Return the one optimizer."""
        return [self.optimizer]


class ReduceBroadcast(Whole):
    """Algorithm 2: rank 0 collects the gradients, updates, and sends the weights."""

    operations = ("reduce", "broadcast")

    def step(self) -> None:
        """Reduce, update on rank 0, broadcast."""
        packed = self.whole.pack_gradients(self.sender.world_size)
        self.sender.start("reduce", self.whole.flat, packed, root=ROOT, **self._by("reduce")).result()
        if self.sender.rank == ROOT:
            self.whole.lend_gradients()
            self.optimizer.step()
            self.whole.pack_weights()()
        self._broadcast(self.whole)
        forget_gradients(self.whole)


class AllReduce(Whole):
    """Algorithm 3: all ranks get the sum and update; now and then rank 0's weights settle rounding differences.

    Our all-reduce gives every rank the same bits, so the weights do not drift apart; the broadcast is the paper's.
    """

    operations = ("all_reduce",)
    steps = 0

    def step(self) -> None:
        """All-reduce, update everywhere, and sometimes broadcast."""
        packed = self.whole.pack_gradients(self.sender.world_size)
        self.sender.start("all_reduce", self.whole.flat, packed, **self._by("all_reduce")).result()
        self.whole.lend_gradients()
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.resync_every == 0:
            self.whole.pack_weights()()
            self._broadcast(self.whole)
        forget_gradients(self.whole)


def forget_gradients(layer: Layer) -> None:
    """Drop a layer's gradients, as `zero_grad` does."""
    for parameter in layer.parameters:
        parameter.grad = None
