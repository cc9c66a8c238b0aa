"""Averages gradients over the replicas of a sharded model while the backward pass goes on.

torch calls a hook for each group of parameters once its gradients are reduce-scattered inside a host, on the thread
that runs the backward pass. What it hands over is a shard that the replicas have to average. It lies in the memory of a
bucket already (`HostScatter`), or is copied there. The bucket is started as soon as all its groups have come, and the
hook returns at once: torch goes on to the next layer. At the end of the backward pass a callback waits for all buckets
and writes averages where torch has put gradients meanwhile, unless those are the bucket's own memory.

On a CPU that is the only way to overlap anything: torch has no streams there, and its own all-reduce of HSDP holds up
the backward pass. On a GPU what is queued stands in this order:

    compute     backward of a layer         ...                                     callback: waits for all
    scatter     sums inside the host, into a bucket or new memory
    reduce      the hook: packs what is new; then torch casts it, adds it to older gradients, moves it to the host
    lanes       a full bucket between the replicas, behind what `reduce` had been given when it was full

Each waits for the one above it, and the next pass's sums for `compute`: so nothing writes to a bucket that is under
way, and no average is read too early. New memory belongs to torch's stream `scatter`, which would use it again as
soon as the host lets go of it; the hook says that `reduce` uses it too.

What torch does between the hook and the callback changes the bucket's memory nowhere: it casts and adds what it has
handed over, which is zero where it adds.

A bucket is averaged by an `Exchange` or, where nothing but the average is asked for, by the engine's own all-reduce, as
in HSDP. Its memory is then laid out as torch has it, padding included, so a group by itself has HSDP's bits.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from penstock.errors import NonFiniteError, PlanError
from penstock.exchange.compression import NATIVE
from penstock.exchange.exchange import Exchange, Handle, ResolvedBucket
from penstock.exchange.traffic import Sent, Used
from penstock.network import Network
from penstock.plan import Plan, Route
from penstock.runtime.communicator import Communicator
from penstock.runtime.timed import largest
from penstock.runtime.transport import Transport, ring_nbytes
from penstock.torch.checkpoint import TorchMemory
from penstock.torch.collective_errors import raise_device_failure, together, who_is_gone
from penstock.torch.engines import device_messages_within, message_seconds, own_transport
from penstock.torch.fsdp.groups import Direct, ParameterShard, ShardGroup
from penstock.torch.hook import Lanes
from penstock.torch.watch import at_end_of_backward

_WHAT = "averaging a bucket over replicas"


@dataclass(slots=True, eq=False)
class GroupBucket:
    """Groups whose gradients travel as one message."""

    groups: tuple[ShardGroup, ...]  # in the order in which they come
    dtype: torch.dtype
    device: torch.device
    resolved: ResolvedBucket  # what the exchange made of their shards
    by_engine: bool  # the engine's own all-reduce averages it, and nothing else is asked for
    starts: dict[str, int]  # of each shard's first element in `memory`, by name
    numel: int  # of `memory`
    come: list["Arrival"] = field(default_factory=list)  # of this iteration, not sent yet
    places: dict[str, torch.Tensor] = field(default_factory=dict)  # of groups in `memory`, for torch to write to
    values: torch.Tensor | None = None  # `memory`, once it was needed

    @property
    def memory(self) -> torch.Tensor:
        """What is sent, flat; the same in every iteration: codecs are bound to it."""
        if self.values is None:
            self.values = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
            if self.device.type == "cuda":  # once: several streams write to it
                torch.cuda.synchronize(self.device)
        return self.values

    def part(self, shard: ParameterShard) -> torch.Tensor:
        """Return where a shard lies in its memory."""
        start = self.starts[shard.name]
        return self.memory[start : start + shard.numel]


@dataclass(slots=True, eq=False)
class Arrival:
    """The gradients of one group in one iteration."""

    group: ShardGroup
    adds: tuple[bool, ...]  # for each shard, whether torch adds to a gradient that is there already


@dataclass(slots=True, eq=False)
class UnderWay:
    """A message that was started."""

    bucket: GroupBucket | None = None  # whose memory will hold the average; None: averaged where torch has it
    arrivals: tuple[Arrival, ...] = ()  # that get their averages from there
    handle: Handle | None = None  # of the exchange
    work: dist.Work | None = None  # of the engine
    done: torch.cuda.Event | None = None  # on our stream, behind the average


class ReplicaAverage:
    """The hook of all groups of one sharded model."""

    def __init__(
        self,
        groups: tuple[ShardGroup, ...],
        replicas: dist.ProcessGroup,
        memory: TorchMemory,
        route: Route,  # without a plan
        device: torch.device,
        direct: Direct | None,  # how ranks of a host exchange shards; None: as torch does
        others: tuple[Transport, ...],  # to ranks that hold other parts of the same model, one for each dimension
    ) -> None:
        self.groups = tuple(each for each in groups if each.shards)  # that are planned
        self._all, self._others = groups, others
        self.replicas, self.device, self._memory = replicas, device, memory
        communicator = Communicator(own_transport(None, replicas), message_seconds(replicas))
        self.exchange = Exchange(communicator, route=route, memory=memory)
        self.holds = False  # nothing is sent before the backward pass has computed everything
        self.on_ready: Callable[[ShardGroup], None] = lambda _: None  # called with each group that comes
        self.on_end: Callable[[], None] = lambda: None  # called when the backward pass has computed everything
        self.on_averaged: Callable[[], None] = lambda: None  # called when all averages are there
        self._together: dict[str, tuple[ShardGroup, ...]] = {}  # by name of a group, those of its planned bucket
        self._buckets: dict[tuple[tuple[ShardGroup, ...], torch.dtype], GroupBucket] = {}
        self._version = 0  # of the exchange's routes, with which they were made
        self._is_running = False
        self._under_way: list[UnderWay] = []
        self._unaveraged: dict[str, torch.Tensor] = {}  # what `set_requires_all_reduce(False)` adds up
        self._lanes = Lanes()
        self._connect()
        for group in groups:
            group.module.set_all_reduce_hook(partial(self._hook, group))
            group.take_over(partial(self._place_for, group), direct)

    def follow(self, plan: Plan, network: Network | None) -> None:
        """Use a plan's messages and routes from now on; its tensors are our groups.

        `network`, where it was measured, is the same on all replicas.
        """
        plan = plan.merged  # a bulk's groups lie side by side
        known = {group.name: group for group in self.groups}
        self.exchange.follow(_by_parameter(plan, known), network)
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

    def forget_pass(self) -> None:
        """Forget a backward pass that was not finished: a new forward pass begins.

        What it has sent is waited for: the next pass writes to the same memory.
        """
        self._is_running = False
        for bucket in self._buckets.values():
            bucket.come.clear()
        under_way, self._under_way = self._under_way, []
        for sent in under_way:
            self._wait(sent)

    def forget_unaveraged(self) -> None:
        """Forget what `set_requires_all_reduce(False)` has added up."""
        self._unaveraged.clear()

    def _connect(self) -> None:
        """Make a group of NCCL of our own where something is compressed; all replicas must call this together."""
        communicator = self.exchange.communicator
        if self._memory.compresses and self.device.type == "cuda" and communicator.messages is None:
            communicator.messages = device_messages_within(self.replicas, message_seconds(self.replicas))

    # The backward pass

    def _hook(self, group: ShardGroup, output: torch.Tensor) -> None:
        """Take a group's gradients, which are summed inside the host; replicas average them from now on."""
        if output.is_cuda:  # torch summed them on another stream, and would use their memory there again too soon
            output.record_stream(torch.cuda.current_stream(output.device))
        if not self._is_running:
            self._begin()
        if group.shards:
            self.on_ready(group)
        if not group.sends:
            _refuse_steps(group)
            self._keep(group, output)
            return
        if (kept := self._unaveraged.pop(group.name, None)) is not None:
            output += kept
        if output.numel() != group.padded_numel:  # some had no gradient or were unfrozen; torch does not say which
            self._average_now(None, output)
        elif group.is_stepped_in_backward:
            self._average_now(self._bucket((group,), output.dtype), output)
        elif self._is_in_place(bucket := self._planned(group, output.dtype)):
            self._average_now(bucket, output)
        else:
            self._take(bucket, group, output)

    def _begin(self) -> None:
        """Begin an iteration, with its first group."""
        self._is_running = True
        if not at_end_of_backward(self._finish):
            raise PlanError("gradients of a sharded model outside of a backward pass; wanted loss.backward()")
        self.exchange.begin()

    def _is_in_place(self, bucket: GroupBucket) -> bool:
        """Whether torch's own stream waits for the engine to average a group where it lies, as in HSDP."""
        return bucket.by_engine and len(bucket.groups) == 1 and self.device.type == "cuda" and not self.holds

    def _take(self, bucket: GroupBucket, group: ShardGroup, output: torch.Tensor) -> None:
        """Put a group into its bucket, and send that once it is full."""
        if any(each.group is group for each in bucket.come):
            self._send(bucket)
        self._settle(group)
        arrival = Arrival(group, tuple(each.gradient is not None for each in group.shards))
        if output is not bucket.places.get(group.name):
            self._pack(bucket, arrival, output)
        bucket.come.append(arrival)
        if len(bucket.come) == len(bucket.groups) and not self.holds:
            self._send(bucket)

    def _pack(self, bucket: GroupBucket, arrival: Arrival, output: torch.Tensor) -> None:
        """Copy a group's shards into their bucket; what torch adds to older gradients meanwhile is zero."""
        group = arrival.group
        if any(arrival.adds):
            self._leave_to_gradients(bucket, group)
        if parts := list(_parts(bucket, group, output)):
            here, given = zip(*parts, strict=True)
            torch._foreach_copy_(here, given)
            if (factor := group.divided_afterwards(output.dtype)) != 1.0:
                torch._foreach_div_(here, factor)
        if any(arrival.adds):
            output.zero_()

    def _place_for(self, group: ShardGroup, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return where in its bucket a group's reduce-scatter may write: gradients are then views of it, as in DDP.

        None: there is no such place, because shards lie there without padding, or the group is averaged where torch
        has it, or torch would add what is there to older gradients, or divide it while it is sent.
        """
        if group.divided_afterwards(dtype) != 1.0 or group.is_stepped_in_backward or not group.sends:
            return None
        if group.name in self._unaveraged or any(each.gradient is not None for each in group.shards):
            return None
        bucket = self._planned(group, dtype)
        if self._is_in_place(bucket) or (group.is_padded and not bucket.by_engine) or not numel:
            return None
        if group.name not in bucket.places:
            start = bucket.starts[group.shards[0].name]
            bucket.places[group.name] = _from_there(bucket.memory[start : start + numel])
        return bucket.places[group.name]

    def _leave_to_gradients(self, bucket: GroupBucket, group: ShardGroup) -> None:
        """Take other memory for a bucket if the user has kept gradients that are views of it, to add to them."""
        if (place := bucket.places.get(group.name)) is None:
            return
        kept = [each.gradient for each in group.shards if each.numel]
        if any(each is not None and each.untyped_storage().data_ptr() == place.data_ptr() for each in kept):
            bucket.values, bucket.places = bucket.memory.clone(), {}

    def _keep(self, group: ShardGroup, output: torch.Tensor) -> None:
        """Add up what replicas will average later, as torch does in HSDP; gradients stay as they are."""
        if group.name in self._unaveraged:
            self._unaveraged[group.name] += output
        else:
            self._unaveraged[group.name] = output.clone()
        output.zero_()

    # Sending

    def _send(self, bucket: GroupBucket) -> None:
        """Start a bucket whose groups have all come; of another, whose others have no gradients, each group by itself.

        Which groups have none may be different in every pass, and a bucket keeps memory and programs.
        """
        come, bucket.come = bucket.come, []
        if len(come) == len(bucket.groups):
            self._under_way.append(self._start(bucket, *come))
            return
        for arrival in come:
            alone = self._bucket((arrival.group,), bucket.dtype)
            for shard in arrival.group.shards:
                alone.part(shard).copy_(bucket.part(shard))
            self._under_way.append(self._start(alone, arrival))

    def _start(self, bucket: GroupBucket, *arrivals: Arrival) -> UnderWay:
        """Start to average a bucket's memory over the replicas."""
        sent, memory = UnderWay(bucket, arrivals), bucket.memory
        if bucket.by_engine:
            sent.work = self._start_engine(bucket, memory)
        elif bucket.numel:
            around = self._lanes.behind(memory.device) if memory.is_cuda else None
            sent.handle = self.exchange.start(bucket.resolved, memory, partial(self._note_done, sent), None, around)
        return sent

    def _note_done(self, sent: UnderWay) -> None:
        """Mark where a bucket's average is there on the stream that this thread gives work to."""
        if self.device.type == "cuda":
            sent.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.done.record(torch.cuda.current_stream(self.device))

    def _start_engine(self, bucket: GroupBucket | None, values: torch.Tensor) -> dist.Work:
        """Have the engine average `values` by the call of HSDP, while this thread goes on."""
        exchange, start = self.exchange, perf_counter()
        name = "some parameters of a group" if bucket is None else bucket.resolved.parcels[0].name
        if bucket is None:
            sent_nbytes = ring_nbytes(values.nbytes, exchange.world_size)
            exchange.note_traffic(Used(name, Route(NATIVE), values.nbytes, sent_nbytes))
        else:
            exchange.note_native(bucket.resolved, values.nbytes)
        with together(_WHAT, self.replicas):
            work: dist.Work = dist.all_reduce(values, dist.ReduceOp.AVG, group=self.replicas, async_op=True)
        sent = exchange.sent
        if self.device.type == "cuda":
            sent.append(Sent(name, start, perf_counter(), is_queued=True))
        else:
            work.get_future().then(lambda _: sent.append(Sent(name, start, perf_counter())))
        return work

    def _average_now(self, bucket: GroupBucket | None, output: torch.Tensor) -> None:
        """Average a group where it lies before torch goes on with it; on a GPU, before torch's stream does.

        `bucket`: of this group alone; None: the engine averages what has gradients, which are not those of the plan.
        NaN or infinity is raised at the end: ranks with other parts wait for this one in the rest of the pass.
        """
        if bucket is None or bucket.by_engine:
            self._wait(UnderWay(work=self._start_engine(bucket, output)))
            return
        parts = list(_parts(bucket, bucket.groups[0], output))
        for here, given in parts:
            here.copy_(given)
        try:
            self._wait(self._start(bucket))
        except NonFiniteError:
            bucket.memory.fill_(torch.nan)
        for here, given in parts:
            given.copy_(here)

    # The end of it

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for all averages and hand them to torch; raise what went wrong, which is the same on all replicas."""
        self.on_end()
        self._is_running = False
        self._wait_for_torch()
        for bucket in [each for each in self._buckets.values() if each.come]:
            self._send(bucket)
        self.exchange.finish()
        under_way, self._under_way = self._under_way, []
        with suppress(NonFiniteError):  # the exchange keeps it
            for each in under_way:
                self._complete(each)
        self._share_nonfinite()
        raise_device_failure(_WHAT, self.replicas)
        self.on_averaged()

    def _share_nonfinite(self) -> None:
        """Tell ranks with other parts of the model of NaN or infinity in this part, so that all raise or skip the step.

        Those whose own part is finite would otherwise wait for the others in torch's next all-gather.
        """
        if (failure := self.exchange.failure) is not None and not isinstance(failure, NonFiniteError):
            raise failure  # a lost rank: others find that out by themselves
        found = float(failure is not None or self._memory.has_nonfinite)
        for transport in self._others if self._memory.compresses else ():
            found = largest(transport, found, message_seconds(self.replicas))
        if found and self._memory.skips:
            self._memory.has_nonfinite = True
        elif found and failure is None:
            self._memory.fail()
            self.exchange.failure = NonFiniteError(
                "a gradient holds NaN or infinity in a part that other ranks average; fix the loss, or pass "
                'on_nonfinite="skip" if a gradient scaler skips such steps'
            )
        if self.exchange.failure is not None:
            raise self.exchange.failure

    def _wait_for_torch(self) -> None:
        """Let the current stream wait for what torch does with gradients on its own: not all passes end with that."""
        for group in self._all if self.device.type == "cuda" else ():
            if (event := group.written) is not None:
                torch.cuda.current_stream(self.device).wait_event(event)

    def _settle(self, group: ShardGroup) -> None:
        """Wait for what a group has under way, if it comes a second time in one pass: its memory is wanted again."""
        for sent in [each for each in self._under_way if any(one.group is group for one in each.arrivals)]:
            self._under_way.remove(sent)
            with suppress(NonFiniteError):  # raised at the end: ranks with other parts go on until then
                self._complete(sent)

    def _complete(self, sent: UnderWay) -> None:
        """Wait for a message, and hand its averages to torch."""
        self._wait(sent)
        for arrival in sent.arrivals:
            assert sent.bucket is not None
            _hand_over(arrival, sent.bucket)

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

    def _planned(self, group: ShardGroup, dtype: torch.dtype) -> GroupBucket:
        """Return the bucket that a group travels in, by the plan."""
        groups = self._together.get(group.name, (group,))
        return self._bucket(groups if all(each.dtype == dtype for each in groups) else (group,), dtype)

    def _bucket(self, groups: tuple[ShardGroup, ...], dtype: torch.dtype) -> GroupBucket:
        """Return the bucket of some groups; made anew where routes have changed."""
        if self._version != self.exchange.version:
            self._version, self._buckets = self.exchange.version, {}
        if (groups, dtype) not in self._buckets:
            self._buckets[groups, dtype] = self._made(groups, dtype)
        return self._buckets[groups, dtype]

    def _made(self, groups: tuple[ShardGroup, ...], dtype: torch.dtype) -> GroupBucket:
        shards = [each for group in groups for each in group.shards]
        here = [each for each in shards if each.numel] or shards[:1]
        names, sizes = [each.name for each in here], [each.numel for each in here]
        resolved = self.exchange.bucket(names, sizes, str(dtype).removeprefix("torch."))
        by_engine = resolved.is_native and self.exchange.only_averages
        starts, numel = dict[str, int](), 0
        for group in groups:
            for each in group.shards:
                starts[each.name] = numel + each.start if by_engine else numel
                numel += 0 if by_engine else each.numel
            numel += group.padded_numel if by_engine else 0
        return GroupBucket(groups, dtype, self.device, resolved, by_engine, starts, numel)


def _parts(bucket: GroupBucket, group: ShardGroup, output: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield where each shard of a group lies in its bucket, and where in what torch has handed over."""
    for each in group.shards:
        if each.numel:
            yield bucket.part(each), output[each.start : each.start + each.numel]


def _refuse_steps(group: ShardGroup) -> None:
    """Refuse optimizers that step in a pass whose gradients replicas average later: torch calls their hooks anyway."""
    if group.is_stepped_in_backward:
        raise PlanError(
            f"module {group.name!r} has hooks that want gradients as soon as they are there, and in this pass replicas "
            "do not average them, by set_requires_all_reduce(False); use set_requires_gradient_sync(False) for it, or "
            "step after the backward pass"
        )


def _from_there(part: torch.Tensor) -> torch.Tensor:
    """Return a part of some memory as a tensor that begins there: torch counts from where a storage does."""
    found: torch.Tensor = from_dlpack(to_dlpack(part))
    return found


def _hand_over(arrival: Arrival, bucket: GroupBucket) -> None:
    """Write a group's averages where torch has put its gradients, or add them to those that were there.

    Where torch has neither cast nor moved what it handed over, gradients are the bucket's own memory.
    """
    for shard, adds in zip(arrival.group.shards, arrival.adds, strict=True):
        gradient, average = shard.gradient, bucket.part(shard).view(shard.shape)
        if gradient is None or not shard.numel or gradient.data_ptr() == average.data_ptr():
            continue
        if adds:
            gradient += average.to(gradient.device, gradient.dtype)
        else:
            gradient.copy_(average)


def _by_parameter(plan: Plan, groups: dict[str, ShardGroup]) -> Plan:
    """Return a plan with parameters in the place of groups: what residuals and routes are kept by."""
    buckets = tuple(
        replace(bucket, tensors=tuple(shard.name for each in bucket.tensors for shard in groups[each].shards))
        for bucket in plan.buckets
    )
    return replace(plan, buckets=buckets)
