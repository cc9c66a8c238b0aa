"""Averages gradients over the replicas of a sharded model while the backward pass goes on.

torch calls a hook for each group of parameters once its gradients are reduce-scattered inside a host, on the thread
that runs the backward pass. What it hands over is a shard that the replicas have to average. The hook copies it into
the memory of a bucket, unless torch has written it there already (`IntoBucket`). The bucket is started on an
`Exchange` as soon as all its groups have come, and the hook returns at once: torch goes on to the next layer. At the
end of the backward pass a callback waits for all buckets and writes averages where torch has put gradients meanwhile.

On a CPU that is the only way to overlap anything: torch has no streams there, and its own all-reduce of HSDP holds up
the backward pass. On a GPU buckets travel on streams of ours, which the callback lets torch's wait for.

What torch does between the hook and the callback changes the bucket's memory nowhere: it casts and adds what it has
handed over, which is zero where it adds. A group alone in its bucket that the engine's own all-reduce carries is
averaged where it lies, as torch does it in HSDP, by the same call: its bits are HSDP's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from penstock.errors import PlanError
from penstock.exchange.exchange import Exchange, Handle, ResolvedBucket
from penstock.exchange.traffic import Sent
from penstock.plan import Plan, Route
from penstock.runtime.communicator import Communicator
from penstock.torch.checkpoint import TorchMemory
from penstock.torch.collective_errors import together, who_is_gone
from penstock.torch.engines import own_transport
from penstock.torch.fsdp.groups import ParameterShard, ShardGroup
from penstock.torch.hook import TIMEOUT_SECONDS, Lanes
from penstock.torch.watch import at_end_of_backward

_WHAT = "averaging a bucket over replicas"


@dataclass(slots=True, eq=False)
class GroupBucket:
    """Groups whose gradients travel as one message."""

    groups: tuple[ShardGroup, ...]  # in the order in which they come
    resolved: ResolvedBucket  # what the exchange made of their shards
    by_engine: bool  # the engine's own all-reduce averages it, and nothing else is asked for
    starts: dict[str, int]  # of each shard's first element in `memory`, by name
    numel: int
    memory: torch.Tensor | None = None  # flat; the same in every iteration: codecs are bound to it
    places: dict[str, torch.Tensor] = field(default_factory=dict)  # of groups in it, for torch to write to
    come: list["Arrival"] = field(default_factory=list)  # of this iteration


@dataclass(slots=True, eq=False)
class Arrival:
    """The gradients of one group in one iteration."""

    group: ShardGroup
    output: torch.Tensor  # what torch handed over, kept until the end of the backward pass
    adds: tuple[bool, ...]  # for each shard, whether torch adds to a gradient that is there already
    bucket: GroupBucket | None = None  # whose memory holds it; None: its gradients are averaged where they lie


@dataclass(slots=True, eq=False)
class UnderWay:
    """A message that was started."""

    arrivals: tuple[Arrival, ...]
    handle: Handle | None = None  # of the exchange
    work: dist.Work | None = None  # of the engine
    done: torch.cuda.Event | None = None  # on our stream, behind the average


class IntoBucket:
    """torch's own reduce-scatter, whose output is written where we say: `set_custom_reduce_scatter` takes this."""

    def __init__(self, of_torch: Any, place: Callable[[int, torch.dtype], torch.Tensor | None]) -> None:
        self._of_torch, self._place = of_torch, place

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a message: that of a bucket, or new."""
        place = self._place(prod(size), dtype)
        found: torch.Tensor = self._of_torch.allocate(size, dtype=dtype, device=device) if place is None else place
        return found

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Do what torch does."""
        return self._of_torch(*arguments, **options)


class ReplicaAverage:
    """The hook of all groups of one sharded model."""

    def __init__(
        self,
        groups: tuple[ShardGroup, ...],
        replicas: dist.ProcessGroup,
        memory: TorchMemory,
        route: Route,  # without a plan
        device: torch.device,
    ) -> None:
        self.groups, self.replicas, self.device, self._memory = groups, replicas, device, memory
        communicator = Communicator(own_transport(None, replicas), TIMEOUT_SECONDS)
        self.exchange = Exchange(communicator, route=route, memory=memory)
        self.on_ready: Callable[[ShardGroup], None] = lambda _: None  # called with each group that comes
        self.on_end: Callable[[], None] = lambda: None  # called when the backward pass has computed everything
        self.on_averaged: Callable[[], None] = lambda: None  # called when all averages are there
        self._together: dict[str, tuple[ShardGroup, ...]] = {}  # by name of a group, those of its planned bucket
        self._buckets: dict[tuple[str, torch.dtype], GroupBucket] = {}  # by name and type
        self._alone: dict[tuple[str, torch.dtype], GroupBucket] = {}  # a group by itself, where the others did not come
        self._version = 0  # of the exchange's routes, with which they were made
        self._is_running = False
        self._under_way: list[UnderWay] = []
        self._put_off: dict[str, torch.Tensor] = {}  # what `set_requires_all_reduce(False)` adds up
        self._lanes = Lanes()
        self._connect()
        for group in groups:
            group.module.set_all_reduce_hook(partial(self._hook, group))
            if group.can_choose_memory:
                scatter: Any = IntoBucket(group.reduce_scatter, partial(self._place_for, group))
                group.module.set_custom_reduce_scatter(scatter)

    def follow(self, plan: Plan) -> None:
        """Use a plan's messages and routes from now on; its tensors are our groups."""
        plan = plan.merged  # a bulk's groups lie side by side
        known = {group.name: group for group in self.groups}
        self.exchange.follow(_by_parameter(plan, known))
        self._together = {
            name: tuple(known[each] for each in bucket.tensors) for bucket in plan.buckets for name in bucket.tensors
        }
        self._connect()

    def send_by(self, route: Route) -> None:
        """Send every group by itself, by one route, from now on."""
        self._together = {}
        self.exchange.send_others_by(route)
        self._memory.compresses |= route.codec is not None
        self._connect()

    def record(self, on: bool) -> None:
        """Note when each instruction starts and ends from now on, or stop doing so."""
        self.exchange.record(on)

    def forget_pass(self) -> None:
        """Forget a backward pass that was not finished: a new forward pass begins."""
        self._is_running, self._under_way = False, []
        for bucket in self._buckets.values():
            bucket.come.clear()

    def _connect(self) -> None:
        """Make a group of NCCL of our own where something is compressed; all replicas must call this together."""
        communicator = self.exchange.communicator
        if self._memory.compresses and self.device.type == "cuda" and communicator.messages is None:
            from penstock.runtime.device.messages import device_messages  # `device/` is for GPUs

            communicator.messages = device_messages(self.replicas, TIMEOUT_SECONDS)

    # The backward pass

    def _hook(self, group: ShardGroup, output: torch.Tensor) -> None:
        """Take a group's gradients, which are summed inside the host; replicas average them from now on."""
        if not self._is_running:
            self._begin()
        self.on_ready(group)
        if not group.sends:
            self._keep(group, output)
            return
        if (kept := self._put_off.pop(group.name, None)) is not None:
            output += kept
        if output.numel() != group.padded_numel:  # some parameters had no gradient, and torch does not say which
            self._by_engine(output)
        elif group.is_stepped_in_backward:
            self._average_now(group, output)
        else:
            self._take(group, output)

    def _begin(self) -> None:
        """Begin an iteration, with its first group."""
        self._is_running, self._under_way = True, []
        if not at_end_of_backward(self._finish):
            raise PlanError("gradients of a sharded model outside of a backward pass; wanted loss.backward()")
        self.exchange.begin()
        self._renew_buckets()

    def _take(self, group: ShardGroup, output: torch.Tensor) -> None:
        """Put a group into its bucket, and send that once it is full."""
        bucket = self._bucket(group, output.dtype)
        if any(each.group is group for each in bucket.come):
            self._send_separately(bucket)
        self._settle(group)
        arrival = Arrival(group, output, tuple(each.gradient is not None for each in group.shards))
        bucket.come.append(arrival)
        if bucket.by_engine and len(bucket.groups) == 1 and self._stays(arrival):
            bucket.come.clear()
            self._send_in_place(bucket, arrival)
            return
        if not self._is_in(bucket, arrival):
            self._pack(bucket, arrival)
        elif not _is_gradient(arrival):
            arrival.bucket = bucket
        if len(bucket.come) == len(bucket.groups):
            self._send(bucket)

    def _stays(self, arrival: Arrival) -> bool:
        """Whether torch's gradients are views of what it handed over, or its stream waits for what is done to that."""
        if self.device.type == "cuda":
            return True
        return _is_gradient(arrival) and arrival.group.divided_afterwards(arrival.output.dtype) == 1.0

    def _send_in_place(self, bucket: GroupBucket, arrival: Arrival) -> None:
        """Have the engine average a group where it lies, as in HSDP."""
        self._under_way.append(UnderWay((arrival,), work=self._start_by_engine(arrival.output, bucket)))

    def _pack(self, bucket: GroupBucket, arrival: Arrival) -> None:
        """Copy a group's shards into their bucket; what torch adds to older gradients meanwhile is zero."""
        group, output = arrival.group, arrival.output
        if any(arrival.adds):
            self._leave_to_gradients(bucket, group)
        arrival.bucket, memory = bucket, self._memory_of(bucket, output.dtype)
        here = [memory[bucket.starts[each.name] :][: each.numel] for each in group.shards if each.numel]
        given = [output[each.start :][: each.numel] for each in group.shards if each.numel]
        if here:
            torch._foreach_copy_(here, given)
            if (factor := group.divided_afterwards(output.dtype)) != 1.0:
                torch._foreach_div_(here, factor)
        if any(arrival.adds):
            output.zero_()

    def _place_for(self, group: ShardGroup, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return where in its bucket a group's reduce-scatter may write: gradients are then views of it, as in DDP.

        None: there is no such place, because the group is padded or alone with the engine, or torch would add what is
        there to older gradients, or divide it while it is sent.
        """
        if numel != group.padded_numel or group.is_padded or not group.numel:
            return None
        if group.divided_afterwards(dtype) != 1.0 or group.is_stepped_in_backward or not group.sends:
            return None
        if group.name in self._put_off or any(each.gradient is not None for each in group.shards):
            return None
        self._renew_buckets()
        bucket = self._bucket(group, dtype)
        if bucket.by_engine and len(bucket.groups) == 1:
            return None
        if group.name not in bucket.places:
            start = bucket.starts[group.shards[0].name]
            bucket.places[group.name] = _from_there(self._memory_of(bucket, dtype)[start:][: group.numel])
        return bucket.places[group.name]

    def _is_in(self, bucket: GroupBucket, arrival: Arrival) -> bool:
        """Whether torch has written a group's gradients into their bucket."""
        return arrival.output is bucket.places.get(arrival.group.name)

    def _leave_to_gradients(self, bucket: GroupBucket, group: ShardGroup) -> None:
        """Take other memory for a bucket if the user has kept gradients that are views of it, to add to them."""
        place = bucket.places.get(group.name)
        if place is None or bucket.memory is None:
            return
        kept = [each.gradient for each in group.shards if each.numel]
        if any(each is not None and each.untyped_storage().data_ptr() == place.data_ptr() for each in kept):
            bucket.memory, bucket.places = bucket.memory.clone(), {}
            for arrival in bucket.come:
                arrival.bucket = bucket

    def _send(self, bucket: GroupBucket) -> None:
        """Start a bucket whose groups have all come."""
        arrivals, memory = tuple(bucket.come), bucket.memory
        bucket.come.clear()
        if memory is None or not bucket.numel:
            return
        sent = UnderWay(arrivals)
        if bucket.by_engine:
            sent.work = self._start_by_engine(memory, bucket)
        else:
            around = self._lanes.behind(memory.device) if memory.is_cuda else None
            sent.handle = self.exchange.start(bucket.resolved, memory, partial(self._note_done, sent), None, around)
        self._under_way.append(sent)

    def _note_done(self, sent: UnderWay) -> None:
        """Mark where a bucket's average is there on the stream that this thread gives work to."""
        if self.device.type == "cuda":
            sent.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.done.record(torch.cuda.current_stream(self.device))

    def _start_by_engine(self, values: torch.Tensor, bucket: GroupBucket) -> dist.Work | None:
        """Have the engine average `values` while this thread goes on; on a GPU torch's own stream waits for it."""
        if self.device.type == "cuda":
            self._by_engine(values, bucket)
            return None
        self.exchange.note_native(bucket.resolved, values.nbytes)
        name, start, sent = bucket.resolved.parcels[0].name, perf_counter(), self.exchange.sent
        work: dist.Work = dist.all_reduce(values, dist.ReduceOp.AVG, group=self.replicas, async_op=True)
        work.get_future().then(lambda _: sent.append(Sent(name, start, perf_counter())))
        return work

    def _by_engine(self, values: torch.Tensor, bucket: GroupBucket | None = None) -> None:
        """Have the engine average `values`, as torch does in HSDP, and wait for that as torch does."""
        start = perf_counter()
        if bucket is not None:
            self.exchange.note_native(bucket.resolved, values.nbytes)
        with together(_WHAT, self.replicas):
            dist.all_reduce(values, dist.ReduceOp.AVG, group=self.replicas)
        name = "some parameters of a group" if bucket is None else bucket.resolved.parcels[0].name
        self.exchange.sent.append(Sent(name, start, perf_counter()))

    def _average_now(self, group: ShardGroup, output: torch.Tensor) -> None:
        """Return once a group is averaged: the user's hooks step with its gradients as soon as this returns."""
        bucket = self._lone_bucket(group, output.dtype)
        if bucket.by_engine or not bucket.numel:
            self._by_engine(output, bucket)
            return
        memory = self._memory_of(bucket, output.dtype)
        parts = [(memory[bucket.starts[each.name] :][: each.numel], output[each.start :]) for each in group.shards]
        for here, given in parts:
            here.copy_(given[: here.numel()])
        bucket.come.append(Arrival(group, output, ()))
        self._send(bucket)
        self._wait(self._under_way.pop())
        for here, given in parts:
            given[: here.numel()].copy_(here)

    def _keep(self, group: ShardGroup, output: torch.Tensor) -> None:
        """Add up what replicas will average later, as torch does in HSDP; gradients stay as they are."""
        if group.name in self._put_off:
            self._put_off[group.name] += output
        else:
            self._put_off[group.name] = output.clone()
        output.zero_()

    # The end of it

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for all averages and hand them to torch; raise what went wrong, which is the same on all replicas."""
        self.on_end()
        self._is_running = False
        self._wait_for_torch()
        for bucket in list(self._buckets.values()):
            self._send_separately(bucket)
        self.exchange.finish()
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            self._complete(each)
        self.on_averaged()

    def _wait_for_torch(self) -> None:
        """Let the current stream wait for what torch does with gradients on its own: not all passes end with that."""
        for group in self.groups if self.device.type == "cuda" else ():
            if (event := group.written) is not None:
                torch.cuda.current_stream(self.device).wait_event(event)

    def _settle(self, group: ShardGroup) -> None:
        """Wait for what a group has under way, if it comes a second time in one pass: its memory is wanted again."""
        for sent in [each for each in self._under_way if any(one.group is group for one in each.arrivals)]:
            self._under_way.remove(sent)
            self._complete(sent)

    def _complete(self, sent: UnderWay) -> None:
        """Wait for a message, and hand its averages to torch."""
        self._wait(sent)
        for arrival in sent.arrivals:
            if arrival.bucket is not None:
                _hand_over(arrival, arrival.bucket)

    def _send_separately(self, bucket: GroupBucket) -> None:
        """Send the groups of a bucket that came, each by itself: others had no gradients in this pass."""
        come, bucket.come = bucket.come, []
        for arrival in come:
            self._settle(arrival.group)
            alone = self._lone_bucket(arrival.group, arrival.output.dtype)
            memory, whole = self._memory_of(alone, arrival.output.dtype), bucket.memory
            assert whole is not None, "a bucket that groups have come for"
            for each in arrival.group.shards:
                memory[alone.starts[each.name] :][: each.numel].copy_(whole[bucket.starts[each.name] :][: each.numel])
            arrival.bucket = alone
            alone.come.append(arrival)
            self._send(alone)

    def _wait(self, sent: UnderWay) -> None:
        """Return once a message is averaged, as far as the current stream is concerned."""
        try:
            if sent.work is not None:
                sent.work.wait()
            if sent.handle is not None:
                self.exchange.wait(sent.handle)
        except Exception as error:  # of the engine, or what the exchange keeps
            self.exchange.failure = self.exchange.failure or error
        if (failure := self.exchange.failure) is not None:
            self.exchange.failure = who_is_gone(failure, _WHAT, self.replicas)
            raise self.exchange.failure
        if sent.done is not None:
            torch.cuda.current_stream(self.device).wait_event(sent.done)

    # Buckets

    def _renew_buckets(self) -> None:
        """Make buckets anew where routes have changed."""
        if self._version != self.exchange.version:
            self._version = self.exchange.version
            self._buckets, self._alone = {}, {}

    def _bucket(self, group: ShardGroup, dtype: torch.dtype) -> GroupBucket:
        """Return a group's bucket."""
        if (found := self._buckets.get((group.name, dtype))) is not None:
            return found
        together = self._together.get(group.name, (group,))
        together = together if all(each.dtype == dtype for each in together) else (group,)
        bucket = self._lone_bucket(group, dtype) if together == (group,) else self._made(together, dtype)
        self._buckets |= {(each.name, dtype): bucket for each in together}
        return bucket

    def _lone_bucket(self, group: ShardGroup, dtype: torch.dtype) -> GroupBucket:
        """Return a bucket that holds one group only."""
        if (group.name, dtype) not in self._alone:
            self._alone[group.name, dtype] = self._made((group,), dtype)
        return self._alone[group.name, dtype]

    def _made(self, groups: tuple[ShardGroup, ...], dtype: torch.dtype) -> GroupBucket:
        shards = [each for group in groups for each in group.shards]
        starts, numel = dict[str, int](), 0
        for each in shards:
            starts[each.name] = numel
            numel += each.numel
        here = [each for each in shards if each.numel] or shards[:1]
        names, sizes = [each.name for each in here], [each.numel for each in here]
        resolved = self.exchange.bucket(names, sizes, str(dtype).removeprefix("torch."))
        by_engine = resolved.is_native and self.exchange.only_averages
        return GroupBucket(groups, resolved, by_engine, starts, numel)

    def _memory_of(self, bucket: GroupBucket, dtype: torch.dtype) -> torch.Tensor:
        if bucket.memory is None:
            bucket.memory = torch.zeros(bucket.numel, dtype=dtype, device=self.device)
            if self.device.type == "cuda":  # once: several streams write to it
                torch.cuda.synchronize(self.device)
        return bucket.memory


def _from_there(part: torch.Tensor) -> torch.Tensor:
    """Return a part of some memory as a tensor that begins there: torch counts from where a storage does."""
    found: torch.Tensor = from_dlpack(to_dlpack(part))
    return found


def _is_gradient(arrival: Arrival) -> bool:
    """Whether what torch handed over is its gradients' own memory: it neither casts nor moves nor adds it."""
    group = arrival.group
    offloads = any(each.of_torch.offload_to_cpu for each in group.shards)
    return arrival.output.dtype == group.shards[0].parameter.dtype and not offloads and not any(arrival.adds)


def _hand_over(arrival: Arrival, bucket: GroupBucket) -> None:
    """Write a group's averages where torch has put its gradients, or add them to those that were there."""
    assert bucket.memory is not None
    for shard, adds in zip(arrival.group.shards, arrival.adds, strict=True):
        gradient = shard.gradient
        if gradient is None or not shard.numel:
            continue
        average = bucket.memory[bucket.starts[shard.name] :][: shard.numel].view(shard.shape)
        if adds:
            gradient += average.to(gradient.device, gradient.dtype)
        else:
            gradient.copy_(average)


def _by_parameter(plan: Plan, groups: dict[str, ShardGroup]) -> Plan:
    """Return a plan with parameters in the place of groups: what residuals and routes are kept by."""

    def names(shards: tuple[ParameterShard, ...]) -> list[str]:
        return [each.name for each in shards]

    buckets = tuple(
        replace(bucket, tensors=tuple(name for each in bucket.tensors for name in names(groups[each].shards)))
        for bucket in plan.buckets
    )
    return replace(plan, buckets=buckets)
