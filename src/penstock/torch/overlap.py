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
| `split` | ours | an all-reduce per bucket, in two halves | one during backward, one during the next forward pass |

`split` takes codecs, plans and planners as `DistributedDataParallel` does: `codec="onebit"`, `plan="plan.json"`,
`planner="exact"`; without a plan each layer is a bucket, and layers of less than 2 MiB are put together.

A linear pipeline, by which the first and the third go unless a strategy is named, takes the block that is best on the
links: they are measured for a second, but where all ranks share one host's few cores.

All of them compute what plain data parallelism computes. Parameters may have no gradient, on some ranks or on all. Each
rank's buffers stay its own. The module is in host memory or on one CUDA device, whose gradients travel through pinned
host memory. Schedulers take `bsp.optimizers`, one or one for each layer, and are stepped after
`bsp.step()`; in the algorithms that update on rank 0 only, their state is there.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist

from penstock.adaptor.world import World
from penstock.codecs.codec import Codec
from penstock.errors import PlanError, did_you_mean
from penstock.exchange.compression import Compression, CompressionOptions
from penstock.exchange.state import State
from penstock.exchange.traffic import Traffic
from penstock.plan import Plan
from penstock.planning.planning import Decision, Planning, PlanningOptions
from penstock.run_record import RouteUse
from penstock.runtime.connect import GLOO
from penstock.runtime.launch import Place
from penstock.strategies import names
from penstock.timeline import Timeline
from penstock.torch.check_inputs import require_group
from penstock.torch.engines import check_engine, message_seconds, own_transport
from penstock.torch.layered import ALL_REDUCES, Layers, Split, TorchSession
from penstock.torch.synchronous import Algorithm, AllReduce, MakeOptimizer, ReduceBroadcast
from penstock.torch.watch import OptimizerWatch

ALGORITHMS: dict[str, type[Algorithm]] = {
    "reduce_broadcast": ReduceBroadcast,
    "all_reduce": AllReduce,
    "layers": Layers,
    "split": Split,
}


class SplitOptions(CompressionOptions, PlanningOptions, total=False):
    """Keywords of `algorithm="split"`, for type checkers: fields of `Compression` and `Planning`."""


class BulkSynchronous(torch.nn.Module):
    """A module that is trained by one of the algorithms of Wang et al., or by `split`, which overlaps more.

    `split` plans where it is given a planner, network or trace, and follows a plan; it cannot plan again
    (`replan_drift`).

    Args:
        module: The model to train, whole on every rank.
        make_optimizer: Called with parameters, returns their optimizer: once for each layer by `layers` and `split`,
            once in all by the others.
        algorithm: How gradients and weights travel.
        strategy: The collective that carries them; empty: chosen. By `all_reduce`, weights still go by a broadcast.
        resync_every: Steps between two broadcasts of rank 0's weights, by `all_reduce`.
        process_group: The ranks that train together; None: all ranks.
        compression: How gradients are compressed, by `split`, as in `DistributedDataParallel`.
        codec: Short for `compression=Compression(codec=...)`.
        planning: How messages are planned, by `split`.
        engine: What carries messages: None is gloo; `mpi` is MPI beside the process group, where mpirun started the
            ranks.
        **keywords: Fields of `Compression` and `Planning` by themselves, for `split`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        make_optimizer: MakeOptimizer,
        algorithm: Literal["reduce_broadcast", "all_reduce", "layers", "split"] = "split",
        strategy: str = "",
        resync_every: int = 5,
        process_group: dist.ProcessGroup | None = None,
        *,
        compression: Compression | None = None,
        codec: str | Codec | None = None,
        planning: Planning | None = None,
        engine: Literal["mpi"] | None = None,
        **keywords: Unpack[SplitOptions],
    ) -> None:
        super().__init__()
        given = {"compression": compression, "codec": codec, "planning": planning}
        options: dict[str, Any] = {**keywords} | {name: value for name, value in given.items() if value is not None}
        if algorithm not in ALGORITHMS:
            near = did_you_mean(algorithm, ALGORITHMS)
            raise PlanError(f"no algorithm called {algorithm!r}; wanted one of {', '.join(ALGORITHMS)}{near}")
        if options and algorithm != "split":
            raise PlanError(f"{next(iter(options))}= with algorithm {algorithm!r}; wanted 'split', or leave it out")
        operations = ALGORITHMS[algorithm].operations or ("all_reduce",)
        known = sorted({name for operation in operations for name in names(operation)})
        known += ALL_REDUCES if algorithm == "split" else ()  # perhaps with options behind the name
        if strategy and strategy.partition("(")[0] not in known:
            near = did_you_mean(strategy, known)
            what = f"no strategy called {strategy!r} carries what algorithm {algorithm!r} sends"
            raise PlanError(f"{what}; wanted one of {', '.join(dict.fromkeys(known))}{near}")
        if resync_every < 1:
            raise PlanError(f"resync_every is {resync_every}; wanted at least 1")
        if not callable(make_optimizer):
            raise TypeError(
                f"make_optimizer is of type {type(make_optimizer).__qualname__}; wanted a function of parameters, such "
                "as lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
            )
        check_engine(engine)
        self.module = module
        group = require_group(process_group)
        place, seconds = Place(dist.get_rank(group), dist.get_world_size(group)), message_seconds(group)
        world = World(place, engine or GLOO, lambda: own_transport(engine, group), timeout_seconds=seconds)
        self._algorithm = ALGORITHMS[algorithm](module, make_optimizer, world, strategy, resync_every, options)
        self._algorithm.begin()
        if isinstance(self._algorithm, Split):
            session = self._algorithm.session
            codecs = {bucket.codec for bucket in session.plan.buckets if bucket.codec} if session.plan else set()
            named = (*session.memory.compression.named, *sorted(codecs))
            self._optimizer = OptimizerWatch(module.parameters(), session.memory, named, world.rank == 0)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; with overlap, each layer waits for its own weights only."""
        if torch.is_grad_enabled():
            self._algorithm.begin_forward()
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
        """The optimizers that update the weights: one of all, or one of each layer."""
        return self._algorithm.every_optimizer()

    def finish(self) -> None:
        """Wait until this rank's weights are those of the last step."""
        self._algorithm.finish()

    def close(self) -> None:
        """Finish, remove all hooks and end the communication threads."""
        self._algorithm.close()

    # What came of it, of `split`

    @property
    def _session(self) -> TorchSession:
        if not isinstance(self._algorithm, Split):
            raise PlanError("this algorithm has no plan, codec or exchange; wanted algorithm='split'")
        return self._algorithm.session

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while profiling."""
        return self._session.plan

    @property
    def decision(self) -> Decision | None:
        """The plan in force with the trace and the network it was made from; None while profiling."""
        return self._session.decision

    def measured_timeline(self) -> Timeline | None:
        """Return what the last finished iteration took on this rank, its second halves included; after `finish()`,
        the last one."""
        return self._session.measured_timeline()

    def record_instructions(self, on: bool = True) -> None:
        """Let `measured_timeline` show every encode, send, recv, merge and decode of the iterations to come."""
        self._session.record_instructions(on)

    def explain(self, picture: bool = False) -> str:
        """Say what was decided and why; what is predicted is of a wrapper that waits before each step."""
        return self._session.explain(picture)

    def bytes_sent(self) -> Traffic:
        """Return the bytes this rank has put on the wire so far, and what a dense all-reduce of the same would have."""
        return self._session.bytes_sent()

    def routes_used(self) -> tuple[RouteUse, ...]:
        """Return by which routes the gradients of the last iteration really travelled, with what this rank sent."""
        return self._session.routes_used()

    def exchange_state_dict(self) -> State:
        """Return what this rank has not sent yet of each parameter's gradient, once the last step is finished.

        It belongs into a checkpoint beside the model and the optimizers. Every rank has its own.
        """
        self.finish()
        return self._session.state_dict()

    def load_exchange_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over from the states of all ranks of an earlier run, whatever their number; all ranks together."""
        self.finish()
        self._session.load_state_dict(states)
