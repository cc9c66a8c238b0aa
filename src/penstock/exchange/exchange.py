"""From "gradients are ready" to "the average is there", for any framework: buckets in lanes, one fixed order in each.

    exchange = Exchange(Communicator(MpiTransport()), Compression("onebit"))
    bucket = exchange.bucket(["weight", "bias"], [4096, 64])      # once; all ranks alike
    for step in range(steps):
        exchange.begin()                                          # an iteration
        handle = exchange.start(bucket, gradients)                # float32, flat; goes on at once
        ...                                                       # more gradients, more buckets
        exchange.wait(handle)                                     # `gradients` is the average over all ranks now

All ranks start the same buckets in the same order, which deals them out to lanes: bucket i goes to lane i modulo their
number. A lane is a thread that averages its buckets one after the other, with tags of its own for their messages. So
one bucket is encoded while another's messages are under way, and no rank needs to know how far another lane is: a
bucket waits for those before it in its lane and for nothing else (docs/decisions/0022-an-iteration-is-one-program.md).

Where a plan has bulks, its messages are what is started (`Plan.messages`): gradients of a bulk lie side by side.

Gradients are numpy arrays, or whatever the `arrays` of the memory
know (`arrays.py`); their memory must stay as it is from `start` to `wait`. On an `Exchange` of torch's, buckets that a
GPU can average without a wait of the host are queued there, on the thread that starts them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby
from threading import Lock
from time import perf_counter
from typing import Any

from penstock.errors import NonFiniteError, PlanError
from penstock.exchange.arrays import Buffer
from penstock.exchange.averaging import Averaging, Parcel
from penstock.exchange.compression import NATIVE, Compression
from penstock.exchange.parameter_state import Memory
from penstock.exchange.state import State
from penstock.exchange.traffic import Sent, Traffic, Used, by_route
from penstock.network import Network
from penstock.plan import Plan, Route
from penstock.program.composition import LANES, NATIVE_LANE, in_turn
from penstock.run_record import RouteUse
from penstock.runtime.binding import copy_sources
from penstock.runtime.communicator import Communicator
from penstock.runtime.recorder import Recorder
from penstock.runtime.transport import Notes, ring_nbytes

THREAD, DEVICE = 0, 1  # who does the work of a bucket: the thread of its lane, or a queue of its device
WHOLE, FIRST, SECOND = 0, 1, 2  # what of it is to be done
Done = Callable[[], None]
Failed = Callable[[Exception], None]


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedBucket:
    """A bucket's parcels: stretches of it whose tensors have one route."""

    parcels: tuple[Parcel, ...]
    version: int  # of the routes that it was made for
    has_native: bool  # the engine's own all-reduce carries some of it: that is called in one order, in lane 0

    @property
    def names(self) -> tuple[str, ...]:
        """Its parameters, in order."""
        return tuple(name for parcel in self.parcels for name in parcel.names)

    @property
    def is_coded(self) -> bool:
        """Whether a codec makes something of all of it."""
        return all(each.route.codec is not None for each in self.parcels)

    @property
    def is_native(self) -> bool:
        """Whether the engine's own all-reduce carries all of it."""
        return all(each.route == Route(NATIVE) for each in self.parcels)


@dataclass(slots=True, eq=False)
class Iteration:
    """The buckets of one iteration."""

    before: "list[Future[None]]"  # what is done before it begins: buckets of the one before, and clipping
    turn: Iterator[int]  # the lanes of its buckets
    begun: "Future[None]" = field(default_factory=Future)  # the first bucket begins it
    futures: "list[Future[None]]" = field(default_factory=list)  # of its buckets
    is_fresh: bool = True  # nothing of it was started yet
    parcels: int = 0  # that were started


@dataclass(slots=True, eq=False)
class Handle:
    """A bucket that was started."""

    bucket: ResolvedBucket
    values: Buffer  # flat
    done: Done | None  # called once its average is there
    failed: Failed | None  # called with what went wrong instead
    around: Callable[[int], AbstractContextManager[None]] | None  # of values on a device: entered around its work
    iteration: Iteration
    number: int  # of its first parcel in the iteration
    is_first: bool  # of its iteration
    lane: int = NATIVE_LANE  # whose thread averages it, where it is not queued on a device
    future: Future[None] | None = None  # None: held back
    is_divided: bool = False  # by the ranks, before it was started
    sources: Sequence[Buffer] = ()  # where its gradients are instead, each flat; `values` is memory for the average


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
        lanes: int = LANES,  # buckets in host memory that are under way at a time
        halves: bool = False,  # finished sums travel after all partial ones, those of the last bucket first
        servers: int = 0,  # ranks at the end that only aggregate; averages are over the others
    ) -> None:
        self.memory = memory or Memory((compression or Compression()).scheme())
        self.communicator = communicator
        self.rank, self.world_size = communicator.transport.rank, communicator.transport.world_size
        self._averaging = Averaging(communicator, self.memory, leaves_out, lanes, halves, servers)
        self._halves = halves
        self._halfway: list[Handle] = []  # whose second half has yet to be started
        self._clips_model = self.memory.compression.momentum.clips_model
        self._beside = Traffic(0, 0)  # of buckets that travel beside this exchange
        self._without_native = tuple(without_native)
        self._otherwise = route or self.memory.compression.route("", self.world_size)
        self._encodes = self.world_size > 1  # one worker sends nothing, so it has nothing to encode
        self.memory.compresses |= self._encodes and self._otherwise.codec is not None
        self._routes: dict[str, Route] = {}  # of each tensor in the plan
        self._overlap = True
        self.version = 0  # of the routes: buckets that were made before it changed are of no more use
        self._held: list[Handle] = []  # where nothing is sent before the end
        self._recorder: Recorder | None = None
        self._nonfinite_elsewhere = False
        self._on_their_way: list[Handle] = []  # queued buckets whose last round is not queued yet
        self._threads = [
            ThreadPoolExecutor(1, f"penstock-exchange-{lane}") for lane, _ in enumerate(self._averaging.transports)
        ]
        for thread in self._threads:
            thread.submit(int)  # starts it: how many threads a job has does not hang on the plans it comes to
        self._iteration = Iteration([], in_turn(len(self._threads)))
        self.sent: list[Sent] = []  # this iteration's parcels
        self.used: list[Used] = []  # their routes and bytes
        self.failure: Exception | None = None  # what ended this exchange, on every rank
        self._failed_at, self._failing = 0, Lock()  # the number of the parcel that it began with

    # What is sent how

    def follow(self, plan: Plan, network: Network | None = None) -> None:
        """Use the plan's routes from now on; make buckets again.

        `network`, where it was measured, is the same on all ranks: linear pipelines take the block size best on it.
        """
        self.communicator.network = network or self.communicator.network
        self._overlap = plan.overlap
        self._averaging.forget_programs()
        self.memory.compresses |= self._encodes and any(bucket.codec for bucket in plan.buckets)
        self._routes = {name: bucket.route for bucket in plan.buckets for name in bucket.tensors}
        nbytes: Counter[Route] = Counter()
        for bucket in plan.buckets:
            nbytes[bucket.route] += bucket.nbytes
        self.send_others_by(nbytes.most_common(1)[0][0] if nbytes else self._otherwise)

    def send_others_by(self, route: Route) -> None:
        """Send what no plan names by one route from now on; make buckets again."""
        self._otherwise = route
        self.version += 1

    def bucket(self, names: Sequence[str], sizes: Sequence[int], dtype: str = "float32") -> ResolvedBucket:
        """Return a bucket of these parameters, in this order, with so many elements each, for `start`.

        Make it once and start it in every iteration; make it again when `version` changes.
        """
        routes = [self._routes.get(name, self._otherwise) if self._encodes else Route(NATIVE) for name in names]
        if dtype in self._without_native:
            routes = [Route("ring") if route == Route(NATIVE) else route for route in routes]
        starts, parcels = tuple(accumulate(sizes, initial=0)), list[Parcel]()
        for route, group in groupby(range(len(names)), key=routes.__getitem__):
            here = list(group)
            first, stop = here[0], here[-1] + 1
            parcels.append(self._averaging.parcel(names[first:stop], sizes[first:stop], route, starts[first], dtype))
        has_native = any(route.strategy == NATIVE for route in routes)
        return ResolvedBucket(tuple(parcels), self.version, has_native)

    @property
    def only_averages(self) -> bool:
        """Whether a native bucket needs nothing but the engine's own all-reduce, as soon as it is ready."""
        memory = self.memory
        return self._overlap and not (memory.compression.momentum.is_used or memory.skips or memory.compresses)

    def only_sums(self, bucket: ResolvedBucket) -> bool:
        """Whether the gradients of a bucket are summed as they are, and may be divided by the ranks beforehand."""
        is_dense = all(each.route.codec is None for each in bucket.parcels)
        return is_dense and not self.memory.compression.momentum.is_used

    def record(self, on: bool) -> None:
        """Note when each instruction starts and ends from the next iteration on, or stop doing so.

        Of buckets that are queued on a device nothing is noted: the host does not know when their kernels run.
        """
        self._recorder = self.communicator.recorder = Recorder() if on else None

    # An iteration

    def begin(self) -> None:
        """Begin an iteration; what an earlier one has left unsent is dropped."""
        self._land()
        self._held, self._halfway, self._nonfinite_elsewhere = [], [], False
        self.sent, self.used = [], []
        self._iteration = Iteration(self._iteration.futures, in_turn(len(self._threads)))
        if self._recorder is not None:
            self._recorder.clear()

    def start(
        self,
        bucket: ResolvedBucket,
        values: Buffer,
        done: Done | None = None,
        failed: Failed | None = None,
        around: Callable[[int], AbstractContextManager[None]] | None = None,
        is_divided: bool = False,
        sources: Sequence[Buffer] = (),
    ) -> Handle:
        """Start to replace a bucket's gradients by their average over all ranks; `wait` for the handle.

        Where the norm of all gradients is clipped, or the plan has no overlap, nothing is sent before `finish`. `done`
        or, with what went wrong, `failed` is called on the thread that did the work. Of values on a device, the work is
        done inside of `around(THREAD)` or, where all of it is queued there, `around(DEVICE)`. What is queued may come
        to its end only with the next bucket, or with `finish` or `wait`. `is_divided`: by the ranks, as is allowed
        where `only_sums` says so. `sources`: where the gradients are instead, each flat and in host memory, until
        `wait` returns; they are read and not changed, and the average comes to `values`.
        """
        if bucket.version != self.version:
            raise PlanError(
                "a bucket that was made before the plan changed; call exchange.bucket(...) again, on all ranks"
            )
        iteration = self._iteration
        handle = Handle(bucket, values, done, failed, around, iteration, iteration.parcels, iteration.is_fresh)
        handle.is_divided = is_divided
        iteration.parcels += len(bucket.parcels)
        iteration.is_fresh = False
        if not bucket.has_native and around is None:  # what is on a device is staged in lane 0 too
            handle.lane = next(iteration.turn)
        if not self._overlap or self._clips_model:
            copy_sources(values, sources)
            self._held.append(handle)
        elif self.communicator.messages is None and not self._halves:
            handle.sources = sources
            handle.future = self._threads[handle.lane].submit(self._run, handle)
            iteration.futures.append(handle.future)
        else:
            copy_sources(values, sources)
            self._send_or_queue(handle)
        return handle

    def finish(self) -> None:
        """Send what was held back: all gradients of this iteration have been started, and their norm is known.

        In halves, this is when finished sums begin to travel: as a forward pass needs them, those of the bucket that
        was started last first.
        """
        held, self._held = self._held, []
        if held and self._clips_model:
            self._iteration.before.append(self._threads[0].submit(self._clip, held))
        for handle in held:
            self._send_or_queue(handle)
        self._land()
        halfway, self._halfway = self._halfway, []
        for handle in reversed(halfway):
            handle.future = self._threads[handle.lane].submit(self._run, handle, THREAD, SECOND)
            handle.iteration.futures.append(handle.future)

    def wait(self, handle: Handle) -> None:
        """Return once a bucket holds its average; raise what went wrong with it, which is the same on every rank.

        What went wrong with another bucket is raised as soon as this rank knows of it: wait for all of an iteration.
        """
        if handle.future is None or handle in self._on_their_way:
            self.finish()
        assert handle.future is not None, "a bucket of an earlier iteration, which was begun anew"
        handle.future.result()
        if self.failure is not None:
            if isinstance(self.failure, NonFiniteError):  # the others still write to their buckets
                for each in handle.iteration.futures:
                    each.result()
            raise self.failure

    def _send_or_queue(self, handle: Handle) -> None:
        """Give a bucket to the thread of its lane, or queue it on its device where all of it can be."""
        values, parcels = handle.values, handle.bucket.parcels
        if all(self._averaging.queues(each, values[each.start : each.stop]) for each in parcels):
            handle.future = Future()
            self._on_their_way.append(handle)
            self._run(handle, DEVICE)
        elif self._halves:
            self._threads[handle.lane].submit(self._run, handle, THREAD, FIRST)
            self._halfway.append(handle)
        else:
            handle.future = self._threads[handle.lane].submit(self._run, handle)
            handle.iteration.futures.append(handle.future)

    def _run(self, handle: Handle, by: int = THREAD, half: int = WHOLE) -> None:
        """Average one bucket, or do one half of that, on the thread of its lane, or queued on a device.

        What goes wrong in an iteration, as a gradient that is not finite, stops no other bucket of it: which of them
        have been started by then is not the same on all ranks. The next iteration does not begin.
        """
        try:
            if by == DEVICE and self.failure is not None:  # these are queued in one order on all ranks
                raise self.failure
            with nullcontext() if handle.around is None else handle.around(by):
                if handle.is_first and half != SECOND:
                    self._begin_iteration(handle.iteration)
                else:
                    handle.iteration.begun.result()
                self._average_parcels(handle, by, half)
                if half == FIRST:
                    return
                if by == DEVICE:
                    self.communicator.messages.behind(partial(self._arrive, handle))
                elif handle.done is not None:
                    handle.done()
        except Exception as error:
            if handle.is_first and not handle.iteration.begun.done():
                handle.iteration.begun.set_exception(error)  # for which all other buckets wait
            if by == DEVICE:
                self._lose(error)
                return
            self._keep_failure(error, handle.number)
            if handle.failed is not None:
                handle.failed(error)
            handle.done = handle.failed = None  # of its second half

    def _average_parcels(self, handle: Handle, by: int, half: int) -> None:
        """Average a bucket's parcels one after the other, or do one half of that; note when, and the bytes sent."""
        transport, messages = self._averaging.transports[handle.lane], self.communicator.messages
        first = 0  # of the tensors of a parcel
        for number, parcel in enumerate(handle.bucket.parcels, handle.number):
            sources = handle.sources[first : first + len(parcel.names)]
            first += len(parcel.names)
            values, start = handle.values[parcel.start : parcel.stop], perf_counter()
            before = transport.sent_nbytes + (messages.sent_nbytes if messages else 0)
            if self._recorder is not None:
                self._recorder.name(parcel.name)
            queued, divided = by == DEVICE, handle.is_divided
            if half == SECOND:
                self._averaging.go_on(parcel)
            else:
                self._averaging.average(parcel, values, queued, handle.lane, number, divided, sources)
            if self._nonfinite_elsewhere:
                self.memory.has_nonfinite = True
            sent = transport.sent_nbytes + (messages.sent_nbytes if messages else 0) - before
            self.sent.append(Sent(parcel.name, start, perf_counter(), queued))
            if half == FIRST:
                parcel.sent_nbytes = sent
            else:
                self.used.append(Used(parcel.name, parcel.route, values.nbytes, sent + parcel.sent_nbytes))

    def _keep_failure(self, error: Exception, number: int) -> None:
        """Keep what ended this exchange: of gradients that are not finite the first, as lanes fail in any order."""
        with self._failing:
            both = isinstance(error, NonFiniteError) and isinstance(self.failure, NonFiniteError)
            if self.failure is None or (both and number < self._failed_at):
                self.failure, self._failed_at = error, number

    def _arrive(self, handle: Handle) -> None:
        """Tell that all of a bucket is queued on its device."""
        self._on_their_way.remove(handle)
        if handle.done is not None:
            handle.done()
        assert handle.future is not None
        handle.future.set_result(None)

    def _land(self) -> None:
        """Queue what is left of buckets on their way."""
        if not self._on_their_way:
            return
        around = self._on_their_way[-1].around
        try:
            with nullcontext() if around is None else around(DEVICE):
                self.communicator.messages.land()
        except Exception as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Give up all buckets on their way."""
        self.failure = self.failure or error
        self.communicator.messages.drop()
        lost, self._on_their_way = self._on_their_way, []
        for handle in lost:
            if handle.failed is not None:
                handle.failed(error)
            assert handle.future is not None
            handle.future.set_result(None)

    def _begin_iteration(self, iteration: Iteration) -> None:
        """Begin an iteration once the one before is done, and let its other buckets go; raise what ended either."""
        for each in iteration.before:
            each.result()
        if self.failure is not None:
            raise self.failure
        self._averaging.begin()
        iteration.begun.set_result(None)

    def _clip(self, handles: Sequence[Handle]) -> None:
        """Scale this rank's gradients, all of them together; runs on the communication thread."""
        try:
            with ExitStack() as stack:
                for handle in handles:
                    if handle.around is not None:
                        stack.enter_context(handle.around(THREAD))
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
        self._nonfinite_elsewhere = True
        if self._iteration.begun.done():  # before, the memory is the last iteration's: then its first bucket tells it
            self.memory.has_nonfinite = True

    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent so far, and what the same gradients take dense."""
        return self._averaging.traffic() + self._beside

    def routes_used(self) -> tuple[RouteUse, ...]:
        """Return what each route carried in this iteration."""
        return by_route(self.used)

    def state_dict(self) -> State:
        """Return what this rank has not sent yet, by parameter, for a checkpoint; call it between iterations."""
        return self.memory.state_dict(self.rank, self.world_size)

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over from the states of all ranks of an earlier run, whatever its number of ranks."""
        self.memory.load_state_dicts(states, self.rank, self.world_size)
        self.recover()

    def recover(self) -> None:
        """Forget a gradient that was not finite, which all ranks raised alike; connections that are lost stay so.

        Also one that a device has not reported yet: the state that it made useless is no longer there.
        """
        self._averaging.forget_nonfinite()
        if isinstance(self.failure, NonFiniteError):
            self.failure = None

    def hang_up(self) -> None:
        """Let ranks fail that wait for our buckets, since a rank is gone."""
        if isinstance(transport := self.communicator.transport, Notes):
            self._threads[0].submit(transport.hang_up).result()

    def close(self) -> None:
        """End the communication threads once they have sent what was started."""
        for thread in self._threads:
            thread.shutdown()
