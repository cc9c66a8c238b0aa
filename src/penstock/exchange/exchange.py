"""From "gradients are ready" to "the average is there", for any framework: one communication thread, one fixed order.

    exchange = Exchange(Communicator(MpiTransport()), Compression("onebit"))
    bucket = exchange.bucket(["weight", "bias"], [4096, 64])      # once; all ranks alike
    for step in range(steps):
        exchange.begin()                                          # an iteration
        handle = exchange.start(bucket, gradients)                # float32, flat; goes on at once
        ...                                                       # more gradients, more buckets
        exchange.wait(handle)                                     # `gradients` is the average over all ranks now

All ranks start the same buckets in the same order. Gradients are numpy arrays, or whatever the `arrays` of the memory
know (`arrays.py`); their memory must stay as it is from `start` to `wait`. On an `Exchange` of torch's, buckets that a
GPU can average without a wait of the host are queued there, on the thread that starts them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import accumulate, groupby
from time import perf_counter
from typing import Any

from penstock.errors import NonFiniteError, PlanError
from penstock.exchange.arrays import Buffer
from penstock.exchange.averaging import Averaging, Parcel
from penstock.exchange.compression import AUTO, NATIVE, Compression, Scheme
from penstock.exchange.parameter_state import Memory
from penstock.exchange.state import State
from penstock.exchange.traffic import Sent, Traffic, Used, by_route
from penstock.plan import Plan, Route
from penstock.run_record import RouteUse
from penstock.runtime.communicator import Communicator
from penstock.runtime.transport import Notes, ring_nbytes

LANES = 4  # queues for buckets on a device: one is encoded while another's messages are under way
Done = Callable[[], None]
Failed = Callable[[Exception], None]


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedBucket:
    """A bucket's parcels: stretches of it whose tensors have one route."""

    parcels: tuple[Parcel, ...]
    version: int  # of the routes that it was made for

    @property
    def is_native(self) -> bool:
        """Whether the engine's own all-reduce carries all of it."""
        return all(each.route == Route(NATIVE) for each in self.parcels)


@dataclass(slots=True, eq=False)
class Handle:
    """A bucket that was started."""

    bucket: ResolvedBucket
    values: Buffer  # flat
    is_first: bool  # of its iteration
    done: Done | None  # called once its average is there
    failed: Failed | None  # called with what went wrong instead
    around: Callable[[int], AbstractContextManager[None]] | None  # entered around its work, with the number of a lane
    future: Future[None] | None = None  # None: held back


class Exchange:
    """Averages buckets over the ranks of one communicator, by the planned routes of their tensors.

    Without a plan everything goes by `route`. Buckets need not be the plan's (torch may make others in the first
    iteration after a plan): every tensor then still travels by its own route, those beside each other with one route
    together. Tensors that the plan does not hold go as most of its bytes do.
    """

    def __init__(
        self,
        communicator: Communicator,
        compression: Compression | None = None,
        *,
        route: Route | None = None,  # without a plan; None: by the first strategy of the codec
        memory: Memory | None = None,  # of an earlier exchange, or with another policy; its compression counts
        leaves_out: bool = False,  # parameters may have no gradient in some iterations
        without_native: Sequence[str] = (),  # types that the engine's own all-reduce cannot sum: they go by ring
    ) -> None:
        self.memory = memory or Memory((compression or Compression()).scheme())
        self.communicator = communicator
        self.rank, self.world_size = communicator.transport.rank, communicator.transport.world_size
        self._averaging = Averaging(communicator, self.memory, leaves_out)
        self._clips_model = self.memory.compression.momentum.clips_model
        self._beside = Traffic(0, 0)  # of buckets that travel beside this exchange
        self._without_native = tuple(without_native)
        self._otherwise = route or _route(self.memory.compression)
        self.memory.compresses |= self._otherwise.codec is not None
        self._routes: dict[str, Route] = {}  # of each tensor in the plan
        self._overlap = True
        self.version = 0  # of the routes: buckets that were made before it changed are of no more use
        self._held: list[Handle] = []  # where nothing is sent before the end
        self._is_fresh = True  # nothing of this iteration was started yet
        self._nonfinite_elsewhere = False
        self._queued = 0  # buckets of this iteration
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-exchange")
        self.sent: list[Sent] = []  # this iteration's parcels
        self.used: list[Used] = []  # their routes and bytes
        self.failure: Exception | None = None  # what ended this exchange, on every rank

    # What is sent how

    def follow(self, plan: Plan) -> None:
        """Use the plan's routes from now on; make buckets anew."""
        self._overlap = plan.overlap
        self.memory.compresses |= any(bucket.codec for bucket in plan.buckets)
        self._routes = {name: bucket.route for bucket in plan.buckets for name in bucket.tensors}
        nbytes: Counter[Route] = Counter()
        for bucket in plan.buckets:
            nbytes[bucket.route] += bucket.nbytes
        self.send_others_by(nbytes.most_common(1)[0][0] if nbytes else self._otherwise)

    def send_others_by(self, route: Route) -> None:
        """Send what no plan names by one route from now on; make buckets anew."""
        self._otherwise = route
        self.version += 1

    def bucket(self, names: Sequence[str], sizes: Sequence[int], dtype: str = "float32") -> ResolvedBucket:
        """Return a bucket of these parameters, in this order, with so many elements each, for `start`.

        Make it once and start it in every iteration; make it anew when `version` changes.
        """
        routes = [self._routes.get(name, self._otherwise) for name in names]
        if dtype in self._without_native:
            routes = [Route("ring") if route == Route(NATIVE) else route for route in routes]
        starts, parcels = tuple(accumulate(sizes, initial=0)), list[Parcel]()
        for route, group in groupby(range(len(names)), key=routes.__getitem__):
            here = list(group)
            first, stop = here[0], here[-1] + 1
            parcels.append(self._averaging.parcel(names[first:stop], sizes[first:stop], route, starts[first], dtype))
        return ResolvedBucket(tuple(parcels), self.version)

    @property
    def only_averages(self) -> bool:
        """Whether a native bucket needs nothing but the engine's own all-reduce, as soon as it is ready."""
        memory = self.memory
        return self._overlap and not (memory.compression.momentum.is_used or memory.skips or memory.compresses)

    # An iteration

    def begin(self) -> None:
        """Begin an iteration; what an earlier one has left unsent is dropped."""
        self._held, self._is_fresh, self._nonfinite_elsewhere = [], True, False
        self.sent, self.used, self._queued = [], [], 0
        if self.communicator.recorder is not None:
            self.communicator.recorder.clear()

    def start(
        self,
        bucket: ResolvedBucket,
        values: Buffer,
        done: Done | None = None,
        failed: Failed | None = None,
        around: Callable[[int], AbstractContextManager[None]] | None = None,
    ) -> Handle:
        """Start to replace a bucket's gradients by their average over all ranks; `wait` for the handle.

        Where the norm of all gradients is clipped, or the plan has no overlap, nothing is sent before `finish`. `done`
        or, with what went wrong, `failed` is called on the thread that did the work. The work is done inside of
        `around(lane)`: lane 0 is the communication thread, others are queues of a device.
        """
        if bucket.version != self.version:
            raise PlanError(
                "a bucket that was made before the plan changed; call exchange.bucket(...) again, on all ranks"
            )
        handle = Handle(bucket, values, self._is_fresh, done, failed, around)
        self._is_fresh = False
        if not self._overlap or self._clips_model:
            self._held.append(handle)
        elif self.communicator.messages is None:
            handle.future = self._thread.submit(self._run, handle)
        else:
            self._send_or_queue(handle)
        return handle

    def finish(self) -> None:
        """Send what was held back: all gradients of this iteration have been started, and their norm is known."""
        held, self._held = self._held, []
        if held and self._clips_model:
            self._thread.submit(self._clip, held)
        for handle in held:
            self._send_or_queue(handle)

    def wait(self, handle: Handle) -> None:
        """Return once a bucket holds its average; raise what went wrong, which is the same on every rank."""
        if handle.future is None:
            self.finish()
        assert handle.future is not None, "a bucket of an earlier iteration, which was begun anew"
        handle.future.result()
        if self.failure is not None:
            raise self.failure

    def _send_or_queue(self, handle: Handle) -> None:
        """Give a bucket to the communication thread, or queue it on its device where all of it can be."""
        values, parcels = handle.values, handle.bucket.parcels
        if all(self._averaging.queues(each, values[each.start : each.stop]) for each in parcels):
            self._run(handle, 1 + self._queued % LANES)
            self._queued += 1
            handle.future = Future()
            handle.future.set_result(None)
        else:
            handle.future = self._thread.submit(self._run, handle)

    def _run(self, handle: Handle, lane: int = 0) -> None:
        """Average one bucket, on lane 0 on the communication thread; after a failure, only pass that on."""
        transport, messages, is_first = self.communicator.transport, self.communicator.messages, handle.is_first
        try:
            if self.failure is not None:
                raise self.failure
            with nullcontext() if handle.around is None else handle.around(lane):
                for parcel in handle.bucket.parcels:
                    values, start = handle.values[parcel.start : parcel.stop], perf_counter()
                    before = transport.sent_nbytes + (messages.sent_nbytes if messages else 0)
                    self._averaging.average(parcel, values, is_first, lane > 0)
                    is_first = False
                    self.memory.has_nonfinite |= self._nonfinite_elsewhere
                    sent = transport.sent_nbytes + (messages.sent_nbytes if messages else 0) - before
                    self.used.append(Used(parcel.name, parcel.route, values.nbytes, sent))
                    self.sent.append(Sent(parcel.name, start, perf_counter()))
                if handle.done is not None:
                    handle.done()
        except Exception as error:
            self.failure = self.failure or error
            if handle.failed is not None:
                handle.failed(error)

    def _clip(self, handles: Sequence[Handle]) -> None:
        """Scale this rank's gradients, all of them together; runs on the communication thread."""
        try:
            with ExitStack() as stack:
                for handle in handles:
                    if handle.around is not None:
                        stack.enter_context(handle.around(0))
                parts = [(each, parcel) for each in handles for parcel in each.bucket.parcels]
                self._averaging.clip([handle.values[parcel.start : parcel.stop] for handle, parcel in parts])
        except Exception as error:
            self.failure = self.failure or error

    # Beside it

    def note_native(self, bucket: ResolvedBucket, nbytes: int) -> None:
        """Count a bucket that the engine's own all-reduce averages beside this exchange."""
        for each in bucket.parcels:
            part = nbytes * (each.stop - each.start) // max(bucket.parcels[-1].stop, 1)
            self.note_traffic(Used(each.name, each.route, part, ring_nbytes(part, self.world_size)))

    def note_traffic(self, used: Used, dense_nbytes: int | None = None) -> None:
        """Count what was sent beside this exchange; `dense_nbytes`: what a ring sends of it, where that is another."""
        self.used.append(used)
        self._beside += Traffic(used.sent_nbytes, used.sent_nbytes if dense_nbytes is None else dense_nbytes)

    def note_nonfinite(self) -> None:
        """Note that a gradient of this iteration which travels beside this exchange is not finite on some rank."""
        self._nonfinite_elsewhere = self.memory.has_nonfinite = True

    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent so far, and what the same gradients take dense."""
        return self._averaging.traffic() + self._beside

    def routes_used(self) -> tuple[RouteUse, ...]:
        """Return what each route carried in this iteration."""
        return by_route(self.used)

    def state_dict(self) -> State:
        """Return what this rank still owes, by parameter, for a checkpoint; call it between iterations."""
        return self.memory.state_dict(self.rank, self.world_size)

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over from the states of all ranks of an earlier run, whatever its number of ranks."""
        self.memory.load_state_dicts(states, self.rank, self.world_size)
        self.recover()

    def recover(self) -> None:
        """Forget a gradient that was not finite, which all ranks raised alike; connections that are lost stay so."""
        if isinstance(self.failure, NonFiniteError):
            self.failure = None

    def hang_up(self) -> None:
        """Let ranks fail that wait for our buckets, since a rank is gone."""
        if isinstance(transport := self.communicator.transport, Notes):
            self._thread.submit(transport.hang_up).result()

    def close(self) -> None:
        """End the communication thread once it has sent what was started."""
        self._thread.shutdown()


def _route(compression: Scheme) -> Route:
    """Return how everything travels without a plan."""
    if compression.codec in (None, AUTO):
        return Route(NATIVE)
    return Route(compression.strategies[0], compression.codec)
