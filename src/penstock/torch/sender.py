"""Hands each bucket to the executor, on one thread and in one order.

torch calls a hook from its backward thread, bucket after bucket, in the same order on every rank. Each bucket goes to
one communication thread, which averages it by the route of the plan over a process group of its own, so that its
messages never meet the user's. The future torch waits for is completed by that thread.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import perf_counter

import torch
import torch.distributed as dist

from penstock.codecs.replay import urgent_stream
from penstock.errors import NonFiniteError
from penstock.plan import Plan, Route
from penstock.runtime.communicator import Communicator
from penstock.runtime.recorder import Recorder
from penstock.torch.checkpoint import State, with_names
from penstock.torch.compression import NATIVE
from penstock.torch.engines import own_transport, release, route_over
from penstock.torch.exchange import Exchange, Parcel
from penstock.torch.measured import Sent
from penstock.torch.memory import Memory
from penstock.torch.passes import at_end_of_backward
from penstock.torch.together import who_is_gone
from penstock.torch.traffic import CountingTransport, Traffic, ring_nbytes

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[..., Future]
Job = tuple[Parcel, Future, torch.cuda.Event | None]  # a bucket, who waits for it, and when a GPU has filled it
TIMEOUT_SECONDS = 300.0  # of one message


class BucketSender:
    """Averages buckets by their planned routes; buckets the plan does not know go by `otherwise`."""

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
        self._communicator = communicator
        self._exchange = Exchange(communicator, transport, memory, leaves_out)
        self._engine_traffic = Traffic(0, 0)  # of buckets that the engine averaged by itself
        self._routes: dict[frozenset[str], Route] = {}
        self._overlap = True
        self._held: list[Job] = []  # where nothing is sent before the end
        self._fresh = True  # nothing of this iteration has come to the exchange yet
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-sender")
        self.sent: list[Sent] = []  # this iteration's buckets
        self.failure: Exception | None = None  # torch wraps what a future raises; the original is kept here
        self._raises_at_end = False  # of this backward pass, what is kept: futures then need not raise

    def begin(self) -> None:
        """Begin an iteration."""
        self.sent = []
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
        self._routes = {
            frozenset(bucket.tensors): Route(bucket.strategy, bucket.codec, bucket.partitions)
            for bucket in plan.buckets
        }

    def hook(self, state: object, bucket: dist.GradBucket) -> Future:  # type: ignore[name-defined]  # torch wants these
        """Average one bucket over all ranks."""
        parcel = self._parcel(bucket)
        if parcel.is_first:
            self._raises_at_end = at_end_of_backward(self._raise_failure)
            self._held, self._fresh = [], True  # an earlier pass may have been broken off
        if self._is_for_torch(parcel):
            return self._by_engine(parcel.values)
        parcel, self._fresh = replace(parcel, is_first=self._fresh), False  # of those that come to the exchange
        future = _future(parcel.values)
        self._held.append((parcel, future, _event(parcel.values)))
        if bucket.is_last() or (self._overlap and not self._momentum.clips_model):
            self._send_held()
        return future

    def _send_held(self) -> None:
        """Give the communication thread what was held back; the norm of all of it is known now, where it counts."""
        if self._momentum.clips_model:
            self._thread.submit(self._clip, self._held)
        for job in self._held:
            self._thread.submit(self._average, *job)
        self._held = []

    def _clip(self, jobs: "list[Job]") -> None:
        """Scale this rank's gradients, all of them together; runs on the communication thread."""
        try:
            with ExitStack() as stack:
                for parcel, _, ready in jobs:
                    stack.enter_context(self._beside(parcel.values.device, ready))
                self._exchange.clip([parcel.values for parcel, _, _ in jobs])
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
        known = list(self._names.values()) if self._knows_names else []
        self._memory.load_state_dicts(with_names(states, known) if known else states, self.rank, self.world_size)
        self.recover()

    def recover(self) -> None:
        """Forget a gradient that was not finite, which all ranks raised alike; connections that are lost stay so."""
        if isinstance(self.failure, NonFiniteError):
            self.failure = None

    def _parcel(self, bucket: dist.GradBucket) -> Parcel:  # type: ignore[name-defined]
        parameters = bucket.parameters()
        names = tuple(self._names.setdefault(id(each), f"parameter {len(self._names)}") for each in parameters)
        route = route_over(self._engine, self._routes.get(frozenset(names), self.otherwise), bucket.buffer().dtype)
        sizes = tuple(parameter.numel() for parameter in parameters)
        return Parcel(bucket.buffer(), names, sizes, route, is_first=bucket.index() == 0)

    def _is_for_torch(self, parcel: Parcel) -> bool:
        """Whether the process group's own all-reduce is all that a bucket needs: nobody looks at what comes of it."""
        ours = self._engine is not None or self._momentum.is_used or self._memory.skips or self._memory.compresses
        return parcel.route == Route(NATIVE) and self._overlap and not ours

    def _by_engine(self, values: torch.Tensor) -> Future:
        nbytes = ring_nbytes(values.nbytes, self.world_size)
        self._engine_traffic += Traffic(nbytes, nbytes)
        values.div_(self.world_size)
        work = dist.all_reduce(values, group=self._group, async_op=True)
        averaged: Future = work.get_future().then(lambda done: self._averaged(done, values))
        return averaged

    def _averaged(self, done: Future, values: torch.Tensor) -> torch.Tensor:
        """Return what the engine made of a bucket; what went wrong is kept for the end of the backward pass."""
        try:
            return done.value()[0]
        except RuntimeError as error:
            if not self._raises_at_end:
                raise
            self.failure = self.failure or error
            return values

    def _average(self, parcel: Parcel, future: Future, ready: torch.cuda.Event | None) -> None:
        """Average one bucket; runs on the communication thread, and after a failure only passes that on.

        On a GPU this is queued on a stream beside the backward pass's, which says when the bucket is `ready`. The
        future makes torch's stream wait for ours; the host waits for no more than what it sends.
        """
        try:
            if self.failure is not None:
                raise self.failure
            start = perf_counter()
            with self._beside(parcel.values.device, ready):
                self._exchange.average(parcel)
                self.sent.append(Sent(parcel.name, start, perf_counter()))
                future.set_result(parcel.values)
        except Exception as error:
            self.failure = self.failure or error
            if self._raises_at_end:
                future.set_result(parcel.values)
            else:
                future.set_exception(error)  # type: ignore[arg-type]  # torch's stub has the result's type here

    def _raise_failure(self) -> None:
        if self.failure is not None:
            self.failure = who_is_gone(self.failure, "averaging a bucket", self._group)
            raise self.failure

    @contextmanager
    def _beside(self, device: torch.device, ready: torch.cuda.Event | None) -> Iterator[None]:
        """Work on our own stream of a GPU, behind the event that fills the bucket."""
        if ready is None:
            yield
            return
        if device not in self._streams:
            self._streams[device] = urgent_stream(device)
        self._streams[device].wait_event(ready)
        with torch.cuda.stream(self._streams[device]):
            yield

    def hang_up(self) -> None:
        """Let ranks fail that wait for our buckets, since a rank is gone."""
        self._thread.submit(self._communicator.transport.hang_up).result()  # type: ignore[attr-defined]  # it counts

    def close(self) -> None:
        """End the communication thread once it has sent what it was given; all ranks together."""
        self._thread.shutdown()
        if self.failure is None:
            release(self._transport)


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
