"""The communication hook: hands torch's buckets to an exchange, and its averages back to torch.

torch calls a hook from its backward thread, bucket after bucket, in the same order on every rank. Each bucket is
started on the exchange, whose communication thread averages it over a process group of its own, so that its messages
never meet the user's. The future that torch waits for is completed by that thread.

Over NCCL, buckets that need no wait of the host are queued where the hook is called, each on a stream beside the
backward pass: these and no others use our group of NCCL, so that all ranks issue its messages in one order.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
import torch.distributed as dist

from penstock.codecs.codec import Codec
from penstock.codecs.graphs import urgent_stream
from penstock.errors import CodecError, PlanError
from penstock.exchange.compression import AUTO, NATIVE, Compression, CompressionOptions, Scheme, from_options
from penstock.exchange.exchange import Exchange, ResolvedBucket
from penstock.exchange.parameter_state import Scaler
from penstock.exchange.state import State
from penstock.exchange.traffic import Traffic, Used
from penstock.log import Voice
from penstock.network import Network
from penstock.plan import Plan, Route
from penstock.planning.planning import check_strategy
from penstock.runtime.communicator import Communicator
from penstock.runtime.connect import WITHOUT_SUMS, release
from penstock.runtime.rehearse import Compiling
from penstock.runtime.transport import ring_nbytes
from penstock.torch.check_inputs import compare_ranks, require_group
from penstock.torch.checkpoint import Loads, TorchMemory
from penstock.torch.collective_errors import raise_device_failure, who_is_gone
from penstock.torch.engines import check_engine, device_messages_within, engine_of, own_transport
from penstock.torch.watch import at_end_of_backward

if TYPE_CHECKING:  # few train with servers
    from penstock.torch.servers import ParameterServers

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[..., Future]
Summed = Callable[[], torch.Tensor]  # returns what the engine summed, or raises why it did not
TIMEOUT_SECONDS = 300.0  # of one message


class Lanes:
    """Streams of our own beside a backward pass on a GPU: lane 0 is the communication thread's, others are queues."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}

    def behind(self, device: torch.device) -> Callable[[int], AbstractContextManager[None]]:
        """Return what puts work on a lane behind what the current stream has been given; the host waits for neither."""
        ready: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(device))
        return partial(self._beside, device, ready)

    @contextmanager
    def _beside(self, device: torch.device, ready: torch.cuda.Event, lane: int) -> Iterator[None]:
        if (device, lane) not in self._streams:
            self._streams[device, lane] = urgent_stream(device)
        self._streams[device, lane].wait_event(ready)
        with torch.cuda.stream(self._streams[device, lane]):
            yield


def _all_reduced(
    values: torch.Tensor, group: dist.ProcessGroup, averaged: Callable[[Summed, torch.Tensor], torch.Tensor]
) -> Future:
    """Have the engine sum `values` over all ranks; return the future of what `averaged` makes of that."""
    try:
        work = dist.all_reduce(values, group=group, async_op=True)
    except RuntimeError as error:  # as NCCL's, once its communicator was aborted
        failure = error

        def fails() -> torch.Tensor:
            raise failure

        future: Future = torch.futures.Future(devices=[values.device] if values.is_cuda else None)
        future.set_result(averaged(fails, values))
        return future
    done = work.get_future()
    summed: Future = done.then(lambda future: averaged(lambda: future.value()[0], values))
    return summed


class NativeAverage:
    """The communication hook where torch averages buckets by itself over gloo: a rank that is gone is named.

    Without a hook `backward()` raises the error of a lost connection as gloo has it: an address, and no rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._share = group, 1.0 / dist.get_world_size(group)
        self._failure: Exception | None = None
        self._task, self._raises_at_end = -1, False

    def hook(self, state: object, bucket: dist.GradBucket) -> Future:  # type: ignore[name-defined]  # torch wants these
        """Average one bucket over all ranks."""
        task = torch._C._current_graph_task_id()  # -1 outside of a backward pass
        if task != self._task or task < 0:
            self._task, self._raises_at_end = task, at_end_of_backward(self._raise_failure)
        values = bucket.buffer().mul_(self._share)  # as torch does it: a factor, not a division
        return _all_reduced(values, self._group, self._averaged)

    def _averaged(self, done: Summed, values: torch.Tensor) -> torch.Tensor:
        try:
            return done()
        except RuntimeError as error:
            self._failure = self._failure or error
            if not self._raises_at_end:
                raise
            return values

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._failure = who_is_gone(self._failure, "averaging a bucket", self._group)
            raise self._failure


class BucketSender:
    """The communication hook of one wrapper: an exchange for the buckets that torch makes.

    torch may make other buckets than planned: in the first iteration after a plan, or where gradients become ready in
    another order. The exchange sends every tensor by its own route all the same.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_seconds: float,
        otherwise: Route,
        memory: TorchMemory,
        names: dict[int, str],  # of parameters, by id
        leaves_out: bool = False,  # parameters may have no gradient in some iterations
        engine: str | None = None,  # what carries everything, where not the process group (`engines.py`)
        averaged: int | None = None,  # how many of the named parameters torch averages, where not all
        servers: "ParameterServers | None" = None,  # ranks beside the group's that only aggregate
    ) -> None:
        self._group, self._names, self._memory, self._engine = group, names, memory, engine
        self._averaged_count = len(names) if averaged is None else averaged
        self._knows_names = bool(names)  # otherwise they are given as parameters come
        self._momentum = memory.compression.momentum
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout_seconds, self._servers = timeout_seconds, servers
        self.exchange = self._make_exchange(otherwise, leaves_out)
        self._buckets: dict[Any, tuple[ResolvedBucket, bool]] = {}  # by torch's; the engine alone averages it
        self._version = 0  # of the exchange's routes, with which they were made
        self._planned: set[frozenset[str]] = set()  # the plan's buckets
        self._followed = 0  # iterations since the routes changed: torch's first ones may be in another order
        self._task = -1  # of autograd, in which this iteration began
        self._come = 0  # parameters of this iteration whose buckets have come
        self._lanes = Lanes()
        self._raises_at_end = False  # of this backward pass, what is kept: futures then need not raise
        self._connect()

    def _make_exchange(self, route: Route, leaves_out: bool) -> Exchange:
        if self._servers is not None:
            from penstock.torch.servers import ServedExchange

            return ServedExchange(self._servers, route, self._memory, leaves_out=leaves_out)
        transport = own_transport(self._engine, self._group)
        communicator = Communicator(transport, timeout_seconds=self._timeout_seconds)
        without_native = WITHOUT_SUMS.get(self._engine or "", ())
        return Exchange(
            communicator, route=route, memory=self._memory, leaves_out=leaves_out, without_native=without_native
        )

    def _connect(self) -> None:
        """Make a group of NCCL of our own where something is compressed; every rank must call this at the same time."""
        communicator = self.exchange.communicator
        wanted = self._memory.compresses and self._engine is None and communicator.messages is None
        if wanted and self._servers is None:
            communicator.messages = device_messages_within(self._group, self._timeout_seconds)

    def follow(self, plan: Plan, network: Network | None = None) -> None:
        """Use the plan's routes from now on, on the network that was measured."""
        self.exchange.follow(plan, network)
        self._connect()
        self._planned = {frozenset(bucket.tensors) for bucket in plan.buckets}
        self._followed = 0

    def hook(self, state: object, bucket: dist.GradBucket) -> Future:  # type: ignore[name-defined]  # torch wants these
        """Average one bucket over all ranks."""
        task, parameters = torch._C._current_graph_task_id(), bucket.parameters()  # -1 outside of a backward pass
        if bucket.index() == 0 and (task != self._task or task < 0):  # a static graph's first buckets all say 0
            self._task, self._come = task, 0
            self._begin()
        elif bucket.index() == 0 and not self._knows_names and self._momentum.clips_model:
            raise PlanError(
                "clip= with static_graph=True: torch does not say which bucket of the first iteration is the last, "
                "after which the norm of all gradients is known; give comm_hook module=, on all ranks"
            )
        self._come += len(parameters)
        is_last = bucket.is_last() or (self._knows_names and self._come == self._averaged_count)  # nor is any the last
        buffer, exchange = bucket.buffer(), self.exchange
        resolved, by_engine = self._buckets.get(key := (buffer.dtype, *map(id, parameters))) or self._resolve(
            key, bucket
        )
        if buffer.is_sparse:
            future = self._average_sparse(buffer, resolved.parcels[0].name)
        elif by_engine:
            exchange.note_native(resolved, buffer.nbytes)
            future = self._all_reduced(buffer)
        else:
            future, around = torch.futures.Future[torch.Tensor](), None
            if buffer.is_cuda:  # such a future makes torch's stream wait for ours
                future = torch.futures.Future(devices=[buffer.device])
                around = self._lanes.behind(buffer.device)
            failed = partial(self._failed, future, buffer)
            exchange.start(resolved, buffer, partial(future.set_result, buffer), failed, around)
        if is_last:
            exchange.finish()
        return future

    def _begin(self) -> None:
        """Begin an iteration, with its first bucket."""
        self._raises_at_end = at_end_of_backward(self._raise_failure)
        self.exchange.begin()
        if self._version != self.exchange.version:
            self._version, self._followed = self.exchange.version, 0
        self._followed += 1
        if self._followed <= 2:  # torch rebuilds its buckets after the first iteration
            self._buckets.clear()

    def _resolve(self, key: Any, bucket: dist.GradBucket) -> tuple[ResolvedBucket, bool]:  # type: ignore[name-defined]
        """Return what the exchange makes of one of torch's buckets, and whether the engine alone can average it."""
        parameters, dtype = bucket.parameters(), str(bucket.buffer().dtype).removeprefix("torch.")
        names = tuple(self._names.setdefault(id(each), f"parameter {len(self._names)}") for each in parameters)
        if not self._knows_names:
            self._memory.know_parameters(dict(zip(names, parameters, strict=True)))
        if not bucket.buffer().is_sparse:
            self._compare_with_plan(names)
        sizes = [each.numel() * (1 + each.is_complex()) for each in parameters]  # torch shows complex numbers as pairs
        found = self.exchange.bucket(names, sizes, dtype)
        self._buckets[key] = found, found.is_native and self._engine is None and self.exchange.only_averages
        return self._buckets[key]

    def _compare_with_plan(self, names: tuple[str, ...]) -> None:
        """Say once which buckets are not the plan's, from the second iteration on: then torch has rebuilt them."""
        if self._planned and self._followed > 1 and (key := frozenset(names)) not in self._planned:
            self._planned.add(key)
            if self.rank == 0:
                warnings.warn(
                    f"torch made a bucket of {len(names)} tensors, {names[0]!r} to {names[-1]!r}, that is not in the "
                    "plan: gradients become ready in another order than planned. Each tensor travels by its planned "
                    "route; for planned messages, plan with a trace of this very training",
                    stacklevel=2,
                )

    def _failed(self, future: Future, buffer: torch.Tensor, error: Exception) -> None:
        """Complete the future that torch waits for; what went wrong is raised when the backward pass ends, or by it."""
        if self._raises_at_end:
            future.set_result(buffer)
        else:
            future.set_exception(error)  # type: ignore[arg-type]  # torch's stub has the result's type here

    def _average_sparse(self, values: torch.Tensor, name: str) -> Future:
        """Average sparse gradients as torch does: the engine gathers what each rank has; no codec applies to them."""
        if self._momentum.is_used:
            raise CodecError(
                f"the gradient of {name!r} is sparse, and momentum= or clip= of the exchange want dense ones; "
                "leave both to the optimizer, or make the embedding with sparse=False"
            )
        indices, kept = values._indices(), values._values()
        sent = (self.world_size - 1) * (indices.nbytes + kept.nbytes)  # to every other rank
        dense = ring_nbytes(values.numel() * values.element_size(), self.world_size)
        self.exchange.note_traffic(Used(name, Route(NATIVE), dense, sent), dense)
        return self._all_reduced(values)

    def _all_reduced(self, values: torch.Tensor) -> Future:
        """Have the engine sum `values` over all ranks while this thread goes on."""
        return _all_reduced(values.div_(self.world_size), self._group, self._averaged)

    def _averaged(self, done: Summed, values: torch.Tensor) -> torch.Tensor:
        """Return what the engine made of a bucket; what went wrong is kept for the end of the backward pass."""
        try:
            total = done()
            if values.is_sparse and self._memory.skips and not torch.isfinite(total._values()).all():
                self.exchange.note_nonfinite()
            return total
        except RuntimeError as error:
            if not self._raises_at_end:
                raise
            self.exchange.failure = self.exchange.failure or error
            return values

    def _raise_failure(self) -> None:
        if (failure := self.exchange.failure) is not None:
            self.exchange.failure = who_is_gone(failure, "averaging a bucket", self._group)
            raise self.exchange.failure
        raise_device_failure("averaging a bucket", self._group)

    def bytes_sent(self) -> Traffic:
        """Return what this rank has sent so far, and what the same gradients take dense."""
        return self.exchange.traffic()

    def exchange_state_dict(self) -> State:
        """Return what this rank has not sent yet, by parameter; call it between iterations."""
        return self.exchange.state_dict()

    def load_exchange_state_dict(self, states: list[Mapping[str, object]]) -> None:
        """Take over from the states of all ranks of an earlier run, whatever its number of ranks."""
        self.exchange.load_state_dict(states)

    def close(self) -> None:
        """End the communication threads once they have sent what they were given; all ranks together."""
        self.exchange.close()
        if self.exchange.failure is None and self._servers is None:
            release(self.exchange.communicator.transport)


def comm_hook(
    strategy: str = AUTO,
    codec: str | Codec | None = None,
    *,
    compression: Compression | None = None,
    module: torch.nn.Module | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    grad_scaler: Scaler | None = None,
    find_unused_parameters: bool = False,
    process_group: dist.ProcessGroup | None = None,
    engine: Literal["mpi"] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **keywords: Unpack[CompressionOptions],
) -> tuple["BucketSender | LateSender", Hook]:
    """Return what torch's own wrapper takes: `ddp.register_comm_hook(*comm_hook("ring"))`.

    Every rank must call this at the same time, as it makes a process group; before there is a default one, everything
    waits until the first bucket arrives. The first of the two values has `exchange_state_dict`,
    `load_exchange_state_dict` and `bytes_sent`.

    Args:
        strategy: The all-reduce of every bucket; `auto` is the engine's own without a codec, and the codec's first
            strategy with one.
        codec: What compresses every bucket, with error feedback; None: nothing does.
        compression: The codec with its settings, as in `DistributedDataParallel`.
        module: The module inside the wrapper. States then name parameters as it does, otherwise by the order in which
            torch hands them over.
        on_nonfinite: What a compressed gradient with NaN or infinity does, on all ranks: raise or skip.
        grad_scaler: The scaler of the training loop, whose scale residuals follow.
        find_unused_parameters: What the wrapper was given.
        process_group: What the wrapper was given; None: all ranks.
        engine: What carries gradients: None is the process group, `mpi` is MPI beside it.
        timeout_seconds: How long one message may take.
        **keywords: Fields of `Compression` by themselves, such as `density=0.01`.
    """
    options: dict[str, Any] = {**keywords} | ({} if codec is None else {"codec": codec})
    scheme = from_options(Compression, compression, "compression", options).scheme()
    if options:
        raise TypeError(f"comm_hook() got an unexpected keyword argument {next(iter(options))!r}")
    if scheme.codec == AUTO:
        raise PlanError("codec 'auto' needs a plan to predict what pays; name a codec, or use DistributedDataParallel")
    scheme.check_planner("torch's")
    if not isinstance(module, torch.nn.Module | None):
        raise TypeError(f"module is {module!r}; wanted a torch.nn.Module, or None")
    check_engine(engine)
    if strategy != AUTO:
        check_strategy(strategy)
        scheme.check_strategy(strategy)
    memory = TorchMemory(scheme, on_nonfinite, grad_scaler)

    def make() -> BucketSender:
        unused = find_unused_parameters
        return _make_sender(strategy, scheme, memory, module, unused, process_group, engine, timeout_seconds)

    if process_group is None and not dist.is_initialized():
        late = LateSender(make)
        return late, late.hook
    sender = make()
    return sender, sender.hook


class LateSender:
    """A hook made before the process group exists, as by frameworks that make that themselves.

    The exchange is made when the first bucket comes: torch calls hooks on all ranks in the same order, so all ranks
    make it at the same time. What it can be asked is what `BucketSender` can be asked, from then on.
    """

    def __init__(self, make: Callable[[], BucketSender]) -> None:
        self._make = make
        self._sender: BucketSender | None = None

    @property
    def sender(self) -> BucketSender:
        """The sender itself."""
        if self._sender is None:
            raise PlanError(
                "this communication hook was made before the process group, and no bucket has come yet; "
                "ask it after the first backward pass, or make it after torch.distributed.init_process_group"
            )
        return self._sender

    def hook(self, state: object, bucket: dist.GradBucket) -> Future:  # type: ignore[name-defined]  # torch wants these
        """Average one bucket over all ranks."""
        if self._sender is None:
            self._sender = self._make()
        return self._sender.hook(state, bucket)

    def bytes_sent(self) -> Traffic:
        """Return what this rank has sent so far, and what the same gradients take dense."""
        return self.sender.bytes_sent() if self._sender is not None else Traffic(0, 0)

    def exchange_state_dict(self) -> State:
        """Return what this rank has not sent yet, by parameter; call it between iterations."""
        return self.sender.exchange_state_dict()

    def load_exchange_state_dict(self, states: list[Mapping[str, object]]) -> None:
        """Take over from the states of all ranks of an earlier run, once there is a process group."""
        if self._sender is None and dist.is_initialized():
            self._sender = self._make()
        self.sender.load_exchange_state_dict(states)

    def close(self) -> None:
        """End the communication thread, if there is one; all ranks together."""
        if self._sender is not None:
            self._sender.close()


def _make_sender(
    strategy: str,
    scheme: Scheme,
    memory: TorchMemory,
    module: torch.nn.Module | None,
    find_unused_parameters: bool,
    group: dist.ProcessGroup | None,
    engine: str | None,
    timeout_seconds: float,
) -> BucketSender:
    """Return what sends torch's buckets by one route; every rank must call this at the same time."""
    group = require_group(group)
    engine_name = engine or engine_of(group, _gradients_device(module))
    chosen = scheme.route(engine_name, dist.get_world_size(group))
    route = chosen if strategy == AUTO else Route(strategy, scheme.codec)
    names = {} if module is None else {id(parameter): name for name, parameter in module.named_parameters()}
    asked = {"strategy": route.strategy, "engine": engine, "find_unused_parameters": find_unused_parameters}
    token = compare_ranks({name: repr(value) for name, value in asked.items()} | memory.options, module, group)
    memory.loads = Loads(group, token, by_exchange=True)
    memory.know_parameters({} if module is None else dict(module.named_parameters()))
    count = 0 if module is None else _averaged_count(module)
    sender = BucketSender(group, timeout_seconds, route, memory, names, find_unused_parameters, engine, count)
    _get_ready(route, module, group)
    return sender


def _averaged_count(module: torch.nn.Module) -> int:
    """Return how many parameters torch's wrapper averages: those that are neither frozen nor ignored."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    owned = (
        (f"{path}.{name}", parameter)  # as torch names them, those of the module itself too
        for path, part in module.named_modules()
        for name, parameter in part.named_parameters(recurse=False)
    )
    return len({parameter for name, parameter in owned if parameter.requires_grad and name not in ignored})


def _gradients_device(module: torch.nn.Module | None) -> torch.device:
    """Return where gradients will lie; without a module, on the GPU if there is one."""
    parameter = None if module is None else next(module.parameters(), None)
    if parameter is not None:
        return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _get_ready(route: Route, module: torch.nn.Module | None, group: dist.ProcessGroup) -> None:
    """Have the kernels of a codec on disk before its first bucket is sent; on a GPU there are others."""
    parameters = [] if module is None else list(module.parameters())
    on_cpu = all(each.device.type == "cpu" for each in parameters) if parameters else not torch.cuda.is_available()
    if route.codec is not None and on_cpu and not (compiling := Compiling(())).is_ready(route):
        with Voice(dist.get_rank(group) == 0).holding_up(f"compiling the kernels of {route.codec}"):
            compiling.ready(route)
