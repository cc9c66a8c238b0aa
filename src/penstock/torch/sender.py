"""Hands each bucket to the executor, on one thread and in one order.

torch calls a hook from its backward thread, bucket after bucket, in the same order on every rank. Each bucket goes to
one communication thread, which averages it by the route of the plan over a process group of its own, so that its
messages never meet the user's. The future torch waits for is completed by that thread.

Over NCCL, buckets that need no wait of the host are queued where the hook is called, each on a stream beside the
backward pass: these and no others use our group of NCCL, so that all ranks issue its messages in one order.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from time import perf_counter

import torch
import torch.distributed as dist

from penstock.codecs.graphs import urgent_stream
from penstock.errors import CodecError, NonFiniteError
from penstock.exchange.compression import NATIVE
from penstock.exchange.exchange import Exchange, Parcel
from penstock.exchange.parameter_state import Memory
from penstock.exchange.traffic import CountingTransport, Traffic, Used, ring_nbytes, sparse_nbytes
from penstock.plan import Plan, Route
from penstock.planning.measured import Sent
from penstock.runtime.communicator import Communicator
from penstock.runtime.device.messages import device_messages
from penstock.runtime.recorder import Recorder
from penstock.torch.backward_watch import at_end_of_backward
from penstock.torch.checkpoint import State
from penstock.torch.collective_errors import who_is_gone
from penstock.torch.engines import own_transport, release, route_over

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[..., Future]
TIMEOUT_SECONDS = 300.0  # of one message
LANES = 4  # streams for buckets that are queued: one is encoded while another's messages are under way


@dataclass(frozen=True, slots=True)
class Job:
    """A bucket for the communication thread."""

    buffer: torch.Tensor  # torch's, flat
    parcels: tuple[Parcel, ...]  # stretches of the buffer, each with its route
    future: Future  # that torch waits for
    ready: torch.cuda.Event | None  # when a GPU has filled the buffer


class BucketSender:
    """Averages buckets by the planned routes of their tensors.

    torch may make other buckets than planned: in the first iteration after a plan, or where gradients become ready in
    another order. Every tensor then still travels by its own route, those beside each other with one route together.
    Tensors that the plan does not hold go by `otherwise`; with a plan, as most of its bytes do.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_seconds: float,
        otherwise: Route,
        memory: Memory,
        names: dict[int, str],  # of parameters, by id
        leaves_out: bool = False,  # parameters may have no gradient in some iterations
        engine: str | None = None,  # what carries everything, where not the process group (`engines.py`)
    ) -> None:
        self._group, self.otherwise, self._names, self._memory = group, otherwise, names, memory
        self._knows_names = bool(names)  # otherwise they are given as parameters come
        self._engine, self._momentum = engine, memory.compression.momentum
        memory.compresses |= otherwise.codec is not None
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._transport = own_transport(engine, group)
        transport = CountingTransport(self._transport)
        communicator = Communicator(transport, timeout_seconds=timeout_seconds)
        self._timeout_seconds, self._queued = timeout_seconds, 0  # buckets of this iteration
        self._communicator = communicator
        self._exchange = Exchange(communicator, transport, memory, leaves_out)
        self._engine_traffic = Traffic(0, 0)  # of buckets that the engine averaged by itself
        self._routes: dict[str, Route] = {}  # of each tensor in the plan
        self._planned: set[frozenset[str]] = set()  # the plan's buckets
        self._followed = 0  # iterations since there is a plan: torch's first ones may be in another order
        self._overlap = True
        self._task = -1  # of autograd, in which this iteration began
        self._come = 0  # parameters of this iteration whose buckets have come
        self._held: list[Job] = []  # where nothing is sent before the end
        self._fresh = True  # nothing of this iteration has come to the exchange yet
        self._sparse_nonfinite = False  # a sparse gradient of this iteration holds NaN or infinity on some rank
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}  # by lane; 0 is the thread's
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-sender")
        self.sent: list[Sent] = []  # this iteration's buckets
        self.used: list[Used] = []  # their routes and bytes
        self._connect()
        self.failure: Exception | None = None  # torch wraps what a future raises; the original is kept here
        self._raises_at_end = False  # of this backward pass, what is kept: futures then need not raise

    def _connect(self) -> None:
        """Make a group of NCCL of our own where something is compressed; every rank must call this at the same time."""
        wanted = self._memory.compresses and self._engine is None
        if wanted and self._communicator.messages is None:
            self._communicator.messages = device_messages(self._group, self._timeout_seconds)

    def _begin(self) -> None:
        """Begin an iteration, with its first bucket."""
        self._raises_at_end = at_end_of_backward(self._raise_failure)
        self._held, self._fresh, self._sparse_nonfinite = [], True, False  # an earlier pass may have been broken off
        self.sent, self.used, self._queued = [], [], 0
        self._followed += 1
        if self.recorder is not None:
            self.recorder.clear()

    @property
    def recorder(self) -> Recorder | None:
        """What notes the instructions of this iteration, where somebody asked for it."""
        return self._communicator.recorder

    def record(self, on: bool) -> None:
        """Note when each instruction starts and ends from now on, or stop doing so."""
        self._communicator.recorder = Recorder() if on else None

    def follow(self, plan: Plan) -> None:
        """Use the plan's routes from now on."""
        self._overlap = plan.overlap
        self._memory.compresses |= any(bucket.codec for bucket in plan.buckets)
        self._connect()
        self._routes = {name: bucket.route for bucket in plan.buckets for name in bucket.tensors}
        self._planned = {frozenset(bucket.tensors) for bucket in plan.buckets}
        self._followed = 0
        nbytes: Counter[Route] = Counter()
        for bucket in plan.buckets:
            nbytes[bucket.route] += bucket.nbytes
        self.otherwise = nbytes.most_common(1)[0][0] if nbytes else self.otherwise

    def hook(self, state: object, bucket: dist.GradBucket) -> Future:  # type: ignore[name-defined]  # torch wants these
        """Average one bucket over all ranks."""
        task = torch._C._current_graph_task_id()  # -1 outside of a backward pass, as in `join`
        if bucket.index() == 0 and (task != self._task or task < 0):  # a static graph's first buckets all say 0
            self._task, self._come = task, 0
            self._begin()
        self._come += len(bucket.parameters())
        is_last = bucket.is_last() or (self._knows_names and self._come == len(self._names))  # nor do they say "last"
        buffer = bucket.buffer()
        if buffer.is_sparse:
            future = self._average_sparse(buffer, self._named(bucket))
        else:
            future = self._average_dense(buffer, self._parcels(bucket))
        if self._held and (is_last or (self._overlap and not self._momentum.clips_model)):
            self._send_held()
        return future

    def _average_dense(self, buffer: torch.Tensor, parcels: tuple[Parcel, ...]) -> Future:
        if all(self._is_for_torch(each) for each in parcels):
            return self._by_engine(buffer, parcels)
        first, self._fresh = replace(parcels[0], is_first=self._fresh), False  # of those that come to the exchange
        job = Job(buffer, (first, *parcels[1:]), _future(buffer), _event(buffer))
        self._held.append(job)
        return job.future

    def _send_held(self) -> None:
        """Give the communication thread what was held back; the norm of all of it is known now, where it counts."""
        if self._momentum.clips_model:
            self._thread.submit(self._clip, self._held)
        for job in self._held:
            if all(self._exchange.queues(parcel) for parcel in job.parcels):
                self._average(job, 1 + self._queued % LANES)
                self._queued += 1
            else:
                self._thread.submit(self._average, job)
        self._held = []

    def _clip(self, jobs: Sequence[Job]) -> None:
        """Scale this rank's gradients, all of them together; runs on the communication thread."""
        try:
            with ExitStack() as stack:
                for job in jobs:
                    stack.enter_context(self._beside(job))
                self._exchange.clip([parcel.values for job in jobs for parcel in job.parcels])
        except Exception as error:
            self.failure = self.failure or error

    def bytes_sent(self) -> Traffic:
        """Return what this rank has sent so far, and what the same gradients take dense."""
        return self._exchange.traffic() + self._engine_traffic

    def exchange_state_dict(self) -> State:
        """Return what this rank still owes, by parameter; call it between iterations."""
        return self._memory.state_dict(self.rank, self.world_size)

    def load_exchange_state_dict(self, states: list[Mapping[str, object]]) -> None:
        """Take over from the states of all ranks of an earlier run, whatever its number of ranks."""
        self._memory.load_state_dicts(states, self.rank, self.world_size)
        self.recover()

    def recover(self) -> None:
        """Forget a gradient that was not finite, which all ranks raised alike; connections that are lost stay so."""
        if isinstance(self.failure, NonFiniteError):
            self.failure = None

    def _named(self, bucket: dist.GradBucket) -> tuple[str, ...]:  # type: ignore[name-defined]
        """Return the names of a bucket's parameters; in the order in which they come where none are known."""
        parameters = bucket.parameters()
        names = tuple(self._names.setdefault(id(each), f"parameter {len(self._names)}") for each in parameters)
        if not self._knows_names:
            self._memory.know(dict(zip(names, parameters, strict=True)))
        return names

    def _parcels(self, bucket: dist.GradBucket) -> tuple[Parcel, ...]:  # type: ignore[name-defined]
        """Return the stretches of a bucket whose tensors have one route; torch shows complex numbers as real pairs."""
        names, values = self._named(bucket), bucket.buffer().view(-1)
        self._compare_with_plan(names)
        sizes = [parameter.numel() * (1 + parameter.is_complex()) for parameter in bucket.parameters()]
        routes = [route_over(self._engine, self._routes.get(name, self.otherwise), values.dtype) for name in names]
        starts, found = tuple(accumulate(sizes, initial=0)), []
        for route, tensors in groupby(range(len(names)), key=lambda index: routes[index]):
            here = list(tensors)
            first, last = here[0], here[-1] + 1
            found.append(
                Parcel(values[starts[first] : starts[last]], names[first:last], tuple(sizes[first:last]), route)
            )
        return tuple(found)

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

    def _is_for_torch(self, parcel: Parcel) -> bool:
        """Whether the process group's own all-reduce is all that a bucket needs."""
        ours = self._engine is not None or self._momentum.is_used or self._memory.skips or self._memory.compresses
        return parcel.route == Route(NATIVE) and self._overlap and not ours

    def _by_engine(self, values: torch.Tensor, parcels: tuple[Parcel, ...]) -> Future:
        nbytes = ring_nbytes(values.nbytes, self.world_size)
        self._engine_traffic += Traffic(nbytes, nbytes)
        self.used += [_used(each, ring_nbytes(each.values.nbytes, self.world_size)) for each in parcels]
        return self._all_reduced(values)

    def _average_sparse(self, values: torch.Tensor, names: tuple[str, ...]) -> Future:
        """Average sparse gradients as torch does: the engine gathers what each rank has; no codec applies to them."""
        if self._momentum.is_used:
            raise CodecError(
                f"the gradient of {names[0]!r} is sparse, and momentum= or clip= of the exchange want dense ones; "
                "leave both to the optimizer, or make the embedding with sparse=False"
            )
        traffic = sparse_nbytes(values, self.world_size)
        self._engine_traffic += traffic
        self.used.append(Used(names[0], Route(NATIVE), traffic.dense_nbytes, traffic.sent_nbytes))
        return self._all_reduced(values)

    def _all_reduced(self, values: torch.Tensor) -> Future:
        """Have the engine sum `values` over all ranks while this thread goes on."""
        values.div_(self.world_size)
        work = dist.all_reduce(values, group=self._group, async_op=True)
        averaged: Future = work.get_future().then(lambda done: self._averaged(done, values))
        return averaged

    def _averaged(self, done: Future, values: torch.Tensor) -> torch.Tensor:
        """Return what the engine made of a bucket; what went wrong is kept for the end of the backward pass."""
        try:
            total = done.value()[0]
            if values.is_sparse and self._memory.skips and not torch.isfinite(total._values()).all():
                self._sparse_nonfinite = self._memory.spoilt = True
            return total
        except RuntimeError as error:
            if not self._raises_at_end:
                raise
            self.failure = self.failure or error
            return values

    def _average(self, job: Job, lane: int = 0) -> None:
        """Average one bucket, on lane 0 on the communication thread; after a failure, only pass that on.

        On a GPU this is queued on a stream beside the backward pass's, which says when the bucket is `ready`. The
        future makes torch's stream wait for ours; the host waits for no more than what it sends.
        """
        try:
            if self.failure is not None:
                raise self.failure
            with self._beside(job, lane):
                for parcel in job.parcels:
                    self._average_parcel(parcel, lane > 0)
                job.future.set_result(job.buffer)
        except Exception as error:
            self.failure = self.failure or error
            if self._raises_at_end:
                job.future.set_result(job.buffer)
            else:
                job.future.set_exception(error)  # type: ignore[arg-type]  # torch's stub has the result's type here

    def _average_parcel(self, parcel: Parcel, queued: bool) -> None:
        start, before = perf_counter(), self._exchange.traffic().sent_nbytes
        self._exchange.average(parcel, queued)
        self._memory.spoilt |= self._sparse_nonfinite
        self.used.append(_used(parcel, self._exchange.traffic().sent_nbytes - before))
        self.sent.append(Sent(parcel.name, start, perf_counter()))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            self.failure = who_is_gone(self.failure, "averaging a bucket", self._group)
            raise self.failure

    @contextmanager
    def _beside(self, job: Job, lane: int = 0) -> Iterator[None]:
        """Work on our own stream of a GPU, behind the event that fills the bucket."""
        device = job.buffer.device
        if job.ready is None:
            yield
            return
        if (device, lane) not in self._streams:
            self._streams[device, lane] = urgent_stream(device)
        self._streams[device, lane].wait_event(job.ready)
        with torch.cuda.stream(self._streams[device, lane]):
            yield

    def hang_up(self) -> None:
        """Let ranks fail that wait for our buckets, since a rank is gone."""
        self._thread.submit(self._communicator.transport.hang_up).result()  # type: ignore[attr-defined]  # it counts

    def abandon(self) -> None:
        """End the communication thread without the other ranks, some of which may be gone."""
        self._thread.shutdown()

    def close(self) -> None:
        """End the communication thread once it has sent what it was given; all ranks together."""
        self._thread.shutdown()
        if self.failure is None:
            release(self._transport)


def _used(parcel: Parcel, sent_nbytes: int) -> Used:
    """Return how a parcel travelled."""
    return Used(parcel.name, parcel.route, parcel.values.nbytes, sent_nbytes)


def _future(values: torch.Tensor) -> Future:
    """Return a future that, on a GPU, also makes the stream of whoever waits for it wait for ours."""
    if not values.is_cuda:
        return torch.futures.Future()
    return torch.futures.Future(devices=[values.device])


def _event(values: torch.Tensor) -> torch.cuda.Event | None:
    """Return an event behind the work that fills `values`, None in host memory."""
    if not values.is_cuda:
        return None
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(values.device))
    return event
