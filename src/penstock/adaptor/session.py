"""The gradients of one model, from "ready" to "averaged", planned while it trains: what adaptors build on.

    session = Session(world, [Gradient("kernel", (784, 10), "float32"), Gradient("bias", (10,), "float32")])
    session.put(1, bias)         # as gradients become ready, in any order, from any thread; copied at once
    session.put(0, kernel)
    kernel, bias = session.wait()

`put` copies a gradient into its bucket. Buckets are sent in one order, which is the same on all ranks: each when it and
those before it are whole, while other gradients are still computed. `wait` returns the averages and ends the iteration;
there, all ranks at the same place, the session goes on with what the wrapper of PyTorch does between two iterations:
profile, measure, plan, change the buckets, and watch what comes of it.

In halves, averages may come while the next iteration computes: `leave` instead of `wait`, then `arrive` for each
gradient when it is needed. What is left is waited for when the next iteration's first gradient comes.
"""

import threading
import warnings
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock.adaptor.buckets import (
    Bucket,
    BucketMemory,
    Gradient,
    Zeros,
    aligned_zeros,
    first_groups,
    is_nan_first,
    numpy_dtype,
    sizes_of,
)
from penstock.adaptor.world import World
from penstock.errors import FitError, NonFiniteError, PenstockError, PlanError
from penstock.exchange.compression import AUTO, NATIVE, Compression, Scheme, adam_warning, from_options
from penstock.exchange.exchange import Exchange, Handle, ResolvedBucket
from penstock.exchange.parameter_state import Memory, Scaler
from penstock.exchange.residuals import Layout
from penstock.exchange.state import State, checksum
from penstock.exchange.traffic import Sent, Traffic, Used
from penstock.log import Voice
from penstock.plan import Plan, Route
from penstock.planning.candidates import routes_to_compile
from penstock.planning.explain import KEPT_TIMES, explain, summary, text_picture
from penstock.planning.inputs import PlanningInputs, compare_models
from penstock.planning.observed import NETWORK, Drift, communication_seconds
from penstock.planning.planning import WARMUP, Decision, Planning
from penstock.planning.profile_summary import Pass, summarise
from penstock.run_record import RouteUse
from penstock.runtime.communicator import Communicator
from penstock.runtime.connect import WITHOUT_SUMS, release
from penstock.runtime.rehearse import Compiling
from penstock.runtime.transport import ring_nbytes
from penstock.timeline import COMPUTE, Span, Timeline
from penstock.trace import ITEMSIZE, Tensor, Trace

Array = NDArray[Any]
FIRST_BUCKETS = "buckets of about 25 MB"


@dataclass(frozen=True, slots=True)
class _Iteration:
    """When what happened in an iteration, on `perf_counter`'s clock."""

    start: float
    backward: float  # when the first gradient came
    ready: tuple[tuple[int, float], ...]  # gradients as they came
    sent: tuple[Sent, ...]

    @property
    def profiled(self) -> tuple[float, tuple[tuple[int, float], ...]]:
        """The end of the forward pass and when each gradient came, in seconds from the start."""
        return self.backward - self.start, tuple((index, at - self.start) for index, at in self.ready)


class Session:
    """Averages the gradients of one model over all ranks of a world, by a plan; every rank makes it at the same time.

    compression, planning, and their fields as keywords, mean what they do in `penstock.torch.DistributedDataParallel`;
    so does `on_nonfinite`. `scaler` says what losses are multiplied by, where a framework scales them.
    `framework` and `model` are for people. `halves` and `leaves_out` are an exchange's.
    """

    def __init__(
        self,
        world: World,
        gradients: Sequence[Gradient],
        *,
        compression: Compression | None = None,
        planning: Planning | None = None,
        on_nonfinite: str = "raise",
        scaler: Scaler | None = None,
        framework: str = "numpy",
        model: str = "model",
        halves: bool = False,
        leaves_out: bool = False,
        **options: Any,
    ) -> None:
        self._asked = from_options(Compression, compression, "compression", options)
        self._planning = from_options(Planning, planning, "planning", options)
        if options:
            raise TypeError(f"unexpected keyword argument {next(iter(options))!r}")
        self.world, self.gradients, self._labels = world, tuple(gradients), (framework, model)
        self.settings, scheme = self._planning.settings(world.engine, races=False), self._asked.scheme()
        scheme.check_strategy(self.settings.strategy)
        scheme.check_planner(self.settings.planner)
        self._check_gradients()
        self.memory = self._new_memory(scheme, on_nonfinite, scaler)
        compare_models(self.settings.options | self.memory.options, list(map(str, gradients)), world.ranks)
        self._check_inputs(scheme)
        self.memory.loads = _Loads(world)
        self.memory.know({each.name: Layout.contiguous(each.shape) for each in gradients})
        self._compiling = Compiling(routes_to_compile(self.settings, scheme))  # meanwhile, on this host
        self._transport = world.new_transport()
        self.exchange = Exchange(
            Communicator(self._transport, timeout_seconds=world.timeout_seconds),
            route=Route(NATIVE),
            memory=self.memory,
            leaves_out=leaves_out,
            halves=halves,
            without_native=WITHOUT_SUMS.get(world.engine, ()),
        )
        self._voice, self._drift = Voice(world.rank == 0), Drift(self.settings.replan_drift)
        self._decision: Decision | None = None
        self._halves = halves
        self.obstacle = ""  # why there will be no plan
        self._lock = threading.Lock()
        self._passes: list[Pass] = []  # profiled
        self._iterations = 0  # finished
        self._last: _Iteration | None = None
        self._started = deque[float](maxlen=KEPT_TIMES + 1)
        self._warned_of: set[str] = set()  # optimizers
        self._left: _Iteration | None = None  # whose averages may still be under way
        self._complaint = ""  # of this rank about its gradients
        # Of the iteration under way:
        self._ready: list[tuple[int, float]] = []  # gradients as they came
        self._next = 0  # bucket to be started
        self._origin = perf_counter()  # when it began
        # A rank that refuses its gradients sends NaN, which shows in the first average that has elements.
        self._first_filled = next((index for index, each in enumerate(gradients) if each.numel), 0)
        self._make_buckets(first_groups(self.gradients))
        if self.settings.plan is not None or self.settings.trace is not None:
            self._plan_together(self.settings.trace)
        self._fresh()

    # An iteration

    def begin(self) -> None:
        """Say that an iteration begins now, where the adaptor knows; else it begins when the one before ended."""
        with self._lock:
            if not self._ready:
                self._origin = perf_counter()

    def put(self, index: int, values: Array, stays: bool = False) -> None:
        """Take this rank's gradient number `index`; its bucket is sent once it and those before it are whole.

        It is copied at once; where nothing but its sum is wanted, it is divided by the ranks in the same pass. One that
        `stays`, as long as the array exists, is not copied where a codec can read it where it is.
        """
        gradient, (bucket, number) = self.gradients[index], self._places[index]
        if values.shape != gradient.shape:
            raise PlanError(f"gradient {gradient.name!r} has shape {values.shape}; wanted {gradient.shape}")
        if values.dtype.name != gradient.dtype:
            raise PlanError(f"gradient {gradient.name!r} is of {values.dtype.name}; wanted {gradient.dtype}")
        if index not in bucket.missing:
            raise PlanError(f"gradient {gradient.name!r} came twice in one iteration; call wait() after all of them")
        if bucket.is_lent:
            with self._lock:
                bucket.take_back()
        if bucket.is_divided:
            np.divide(values, self.world.size, bucket.memory.views[number])
        elif stays and bucket.resolved.is_coded and values.dtype == np.float32 and values.flags.c_contiguous:
            bucket.sources[number] = values.reshape(-1)
        else:
            bucket.memory.views[number][...] = values
        self.came(index)

    def is_lent(self, index: int) -> bool:
        """Whether the bucket of gradient number `index` still has to ask for its memory, which `wait` has lent."""
        return self._places[index][0].is_lent

    def place(self, index: int) -> Any:
        """Return where gradient number `index` is to be put, and its average comes to."""
        bucket, number = self._places[index]
        return bucket.memory.views[number]

    def came(self, index: int) -> None:
        """Say that gradient number `index` is in its place; `put` does so."""
        if self._left is not None:
            self.land()
        bucket = self._places[index][0]
        with self._lock:
            if not self._ready:
                self.exchange.begin()
            self._ready.append((index, perf_counter()))
            bucket.missing.discard(index)
            self._start_whole_buckets()

    def _start_whole_buckets(self) -> None:
        """Start the buckets that are whole, in order."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            flat, is_divided, sources = bucket.memory.flat, bucket.is_divided, bucket.sent
            bucket.handle = self.exchange.start(bucket.resolved, flat, is_divided=is_divided, sources=sources)
            self._next += 1
        if self._next == len(self._buckets):
            self.exchange.finish()

    def wait(self, lend: bool = False, copy: bool = False) -> list[Array]:
        """Return the average of each gradient, once all are there, and end the iteration.

        The arrays are the buckets' memory: the next iteration's `put` overwrites them. With `lend` it does so only
        where nothing refers to these very arrays any more, and takes other memory otherwise; with `copy` they are
        copies, whose memory is used again in the same way. What goes wrong is raised on every rank.
        """
        try:
            averages = self._arrived(lend, copy)
        except NonFiniteError:
            self._compare_complaints()
            raise
        if is_nan_first(averages[self._first_filled]):
            self._compare_complaints()
        return averages

    def _arrived(self, lend: bool, copy: bool) -> list[Array]:
        self._check_all_came()
        for bucket in self._buckets:
            assert bucket.handle is not None
            self._wait(bucket.handle)
        found: dict[int, Array] = {}
        for bucket in self._buckets:
            bucket.is_lent = lend
            found |= zip(bucket.members, bucket.copied() if copy else bucket.memory.views, strict=True)
        self._end_iteration()
        return [found[index] for index in range(len(self.gradients))]

    def refuse(self, complaint: str) -> NoReturn:
        """Raise the same on all ranks for what is wrong with the gradients of this one; none of them has been put.

        The others wait for these gradients: NaN is sent in their place, so that the averages are NaN on all ranks.
        Where they are, `wait` compares complaints.
        """
        self._complaint = complaint
        for index, gradient in enumerate(self.gradients):
            self.put(index, np.full(gradient.shape, np.nan, numpy_dtype(gradient.dtype)))
        self.wait()
        raise PlanError(complaint)  # no gradient has an element

    def _compare_complaints(self) -> None:
        """Raise what any rank has refused, on all of them; they come here together, since averages are the same."""
        mine, self._complaint = self._complaint, ""
        for rank, complaint in enumerate(self.world.gather(mine, "comparing what is wrong with gradients")):
            if complaint:
                raise PlanError(f"rank {rank}: {complaint}")

    def abandon(self) -> None:
        """End an iteration that will bring no more; all ranks together. What is missing counts as zeros to others."""
        if self._ready:
            for index in [index for bucket in self._buckets for index in bucket.missing]:
                gradient = self.gradients[index]
                self.put(index, np.zeros(gradient.shape, numpy_dtype(gradient.dtype)))
            self.wait()

    def leave(self) -> None:
        """End the iteration on this side: its averages come while the next one computes, each when `arrive` is called.

        Nothing is planned meanwhile: call `wait` instead as long as `is_planning`.
        """
        self._check_all_came()
        self._left = self._measured(())
        with self._lock:
            self._forget_gradients()

    def arrive(self, index: int) -> Any:
        """Return the average of gradient number `index` of the iteration that was left, once it is there."""
        bucket = self._places[index][0]
        assert bucket.handle is not None
        self._wait(bucket.handle)
        return self.place(index)

    def land(self) -> None:
        """Return once all averages of the iteration that was left are there."""
        if self._left is not None:
            left, self._left = self._left, None
            for bucket in self._buckets:
                assert bucket.handle is not None
                self._wait(bucket.handle)
            self._note(replace(left, sent=tuple(self.exchange.sent)))

    @property
    def is_planning(self) -> bool:
        """Whether a plan is to come: the end of an iteration may change the buckets."""
        return self._decision is None and not self.obstacle

    def _check_all_came(self) -> None:
        if left := [self.gradients[index].name for bucket in self._buckets for index in bucket.missing]:
            raise PlanError(f"gradient {left[0]!r} and {len(left) - 1} more have not come; put all of them, then wait")
        self._raise_failure()

    def _wait(self, handle: Handle) -> None:
        try:
            self.exchange.wait(handle)
        except Exception as error:
            self.world.note_failure(error)
            self._fresh()
            raise

    def _raise_failure(self) -> None:
        """Raise what went wrong already; all gradients have come, so that every bucket is under way."""
        if isinstance(self.exchange.failure, NonFiniteError):  # the other buckets are still sent
            handle = self._buckets[0].handle
            assert handle is not None
            self._wait(handle)
        if self.exchange.failure is not None:
            self._fresh()
            raise self.exchange.failure

    def _end_iteration(self) -> None:
        self._note(self._measured(tuple(self.exchange.sent)))
        try:
            self._go_on_planning()
        finally:
            self._fresh()

    def _measured(self, sent: tuple[Sent, ...]) -> _Iteration:
        """Return the times of the iteration under way; `sent` are its parcels."""
        ready = tuple(self._ready)
        return _Iteration(self._origin, ready[0][1], ready, sent)

    def _note(self, iteration: _Iteration) -> None:
        """Take note of an iteration that is over."""
        self._last = iteration
        self._started.append(iteration.start)
        self._iterations += 1

    def _fresh(self) -> None:
        """Be ready for an iteration; nothing more is expected of those before, one that failed included."""
        self._left = None
        with self._lock:
            for bucket in self._buckets:
                bucket.handle = None
            self._forget_gradients()

    def _forget_gradients(self) -> None:
        """Expect every gradient again: those of the next iteration."""
        for bucket in self._buckets:
            bucket.forget()
        self._ready, self._next = [], 0
        self._origin = perf_counter()

    def gather_sparse(self, name: str, indices: Array, rows: Array, numel: int) -> tuple[Array, Array]:
        """Return all ranks' rows of a sparse gradient, divided by the ranks, and their indices; no codec applies.

        All ranks call this at the same place, between two iterations. `numel`: of the same gradient if it were dense.
        """
        world = self.world
        sent = (world.size - 1) * (indices.nbytes + rows.nbytes)
        dense = ring_nbytes(numel * rows.itemsize, world.size)
        self.exchange.note_traffic(Used(name, Route(NATIVE), dense, sent), dense)
        return world.all_gather(indices), world.all_gather(rows) / np.asarray(world.size, rows.dtype)

    # What came of it

    @property
    def decision(self) -> Decision | None:
        """The plan in force with what it was made from; None while profiling."""
        return self._decision

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while profiling."""
        return self._decision.plan if self._decision else None

    @property
    def held_seconds(self) -> float:
        """How long planning has held training up, on this rank."""
        return self._voice.held_seconds

    def timeline(self) -> Timeline | None:
        """Return the predicted timeline of an iteration; None while profiling."""
        return self.plan.timeline if self.plan else None

    def measured_timeline(self) -> Timeline | None:
        """Return the last iteration as it was on this rank: forward and backward pass, and each bucket."""
        if (last := self._last) is None:
            return None
        end, rank = max(at for _, at in last.ready) - last.start, self.world.rank
        forward = last.backward - last.start
        spans = [Span("forward", COMPUTE, 0.0, forward, rank), Span("backward", COMPUTE, forward, end, rank)]
        for each in last.sent:
            start, stop = each.start_seconds - last.start, each.end_seconds - last.start
            spans.append(Span(each.name, NETWORK, max(start, 0.0), max(stop, 0.0), rank))
        if (notes := self.exchange.communicator.recorder) is not None:
            spans += notes.timeline(last.start).spans
        return Timeline(tuple(spans))

    def record_instructions(self, on: bool = True) -> None:
        """Let `measured_timeline` show every instruction of the iterations to come, or stop doing so."""
        self.exchange.record(on)

    def explain(self, picture: bool = False) -> str:
        """Say what was decided and why; with `picture`, also draw the predicted iteration above the measured one."""
        taken = [after - before for before, after in pairwise(self._started)]
        wanted, last = self.settings.profile_iterations, self.measured_timeline() if self._decision else None
        profiled, used = len(self._passes), self.routes_used()
        words = explain(self._decision, self.obstacle, profiled, wanted, taken, self._drift, last, used, FIRST_BUCKETS)
        if not picture:
            return words
        return "\n".join([words, *text_picture({"predicted": self.timeline(), "measured": self.measured_timeline()})])

    def bytes_sent(self) -> Traffic:
        """Return the bytes this rank has put on the wire so far, and what a dense all-reduce of the same would have."""
        return self.exchange.traffic()

    def routes_used(self) -> tuple[RouteUse, ...]:
        """Return by which routes the gradients of the last iteration really travelled."""
        return self.exchange.routes_used()

    def watch_optimizer(self, name: str, adaptive: bool) -> None:
        """Warn once, on rank 0, of a codec that is not safe for an optimizer which divides by past gradients."""
        warning = adam_warning(self.memory.compression.named, name)
        if adaptive and warning and self.world.rank == 0 and name not in self._warned_of:
            self._warned_of.add(name)
            warnings.warn(warning, stacklevel=3)

    # Checkpoints

    def state_dict(self) -> State:
        """Return what this rank still owes, by name; call it between iterations. Every rank has its own."""
        return self.exchange.state_dict()

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over from the states of all ranks of an earlier run, whatever their number; all ranks together."""
        self.exchange.load_state_dict(states)

    def recover(self) -> None:
        """Go on after a gradient that was not finite: what is owed was replaced, on all ranks alike."""
        self.memory.recover()
        self.exchange.recover()

    def close(self) -> None:
        """End the communication thread once it has sent what it was given; all ranks together."""
        self.exchange.close()
        self._compiling.stop()
        if self.exchange.failure is None:
            release(self._transport)

    # Planning

    def _check_gradients(self) -> None:
        names = Counter(each.name for each in self.gradients)
        if twice := [name for name, count in names.items() if count > 1]:
            raise PlanError(f"two gradients are called {twice[0]!r}; wanted a name for each")
        if not names:
            raise PlanError("no gradients; wanted at least one")
        if other := [each for each in self.gradients if each.dtype not in ITEMSIZE]:
            raise PlanError(f"gradient {other[0]}; wanted one of {', '.join(ITEMSIZE)}")

    def _check_inputs(self, scheme: Scheme) -> None:
        settings, nbytes = self.settings, {each.name: each.nbytes for each in self.gradients}
        inputs = PlanningInputs(settings.plan, settings.trace, settings.network)
        inputs.agree(nbytes, False, scheme, self.world.ranks)

    def _go_on_planning(self) -> None:
        if self._decision is None and not self.obstacle:
            self._profile()
        elif self._decision is not None and self.settings.replan_drift:
            self._watch_drift()

    def _profile(self) -> None:
        """Note one iteration; plan once there are enough. Nothing is compiled beside those that count."""
        assert self._last is not None
        if not self._passes:
            self._voice.say(f"profiling {self.settings.profile_iterations} iterations, then planning")
        forward, ready = self._last.profiled
        self._passes.append(Pass(forward, tuple((self.gradients[index].name, at) for index, at in ready)))
        if len(self._passes) == WARMUP:
            self._compiling.pause()
        if len(self._passes) >= self.settings.profile_iterations:
            self._plan_together(self._trace())

    def _trace(self) -> Trace:
        """Return what the profiled iterations say: gradients in the order in which they come."""
        framework, model = self._labels
        times = summarise(self._passes[WARMUP:])
        dtype, numels = sizes_of(self.gradients)
        count = len(self._passes) - WARMUP
        return Trace(
            model=model,
            device="cpu",
            batch=1,
            dtype=dtype,
            forward_seconds=times.forward_seconds,
            tensors=tuple(Tensor(name, numels[name], taken) for name, (taken, _) in times.intervals.items()),
            source=f"penstock.{framework}: median of {count} iterations after {WARMUP} to warm up",
        )

    def _plan_together(self, trace: Trace | None) -> None:
        """Measure on all ranks, plan on rank 0, tell all ranks and change the buckets."""
        with self._voice.holding_up("planning") as outcome:
            try:
                decision = self._decide(trace)
                for route in dict.fromkeys(bucket.route for bucket in decision.plan.buckets):
                    self._ready_for(route)
            except FitError as error:  # the same on all ranks, which agree on every time; training goes on
                self._voice.warn(f"no plan: the network could not be measured ({error})")
                if self._decision is None:
                    self._do_without(f"the network could not be measured ({error})")
                return
            self._compiling.stop()
            self._adopt(decision)
            outcome += summary(decision)

    def _decide(self, trace: Trace | None) -> Decision:
        if (given := self.settings.plan) is not None and self._decision is None:
            return Decision(given)
        from penstock.planning.survey import plan_over  # with planners and the simulator

        world, again = self.world, self._decision is not None
        planning = replace(self._planning, plan=None, network=None if again else self._planning.network)
        assert trace is not None
        return plan_over(world.transport, world.engine, trace, self._asked, planning, self._ready_for, self._halves)

    def _ready_for(self, route: Route) -> None:
        """Return once the kernels of a route are on disk."""
        self._compiling.get_ready(route, self._voice)

    def _adopt(self, decision: Decision) -> None:
        self._decision, plan = decision, decision.plan.merged  # a bulk's gradients lie side by side
        self.exchange.follow(plan, decision.network)
        numbers = {each.name: index for index, each in enumerate(self.gradients)}
        self._make_buckets([[numbers[name] for name in bucket.tensors] for bucket in plan.buckets])
        self._drift.predicted_seconds = communication_seconds(plan.timeline)
        self._started.clear()

    def _do_without(self, obstacle: str) -> None:
        """Go on without a plan: a codec compresses the first buckets as they are."""
        self.obstacle, scheme, strategy = obstacle, self.memory.compression, self.settings.strategy
        scheme.refuse_parts(f"without a plan, since {obstacle}, and the first buckets are parts of the model")
        if scheme.codec not in (None, AUTO):
            route = Route(scheme.strategies[0] if strategy == AUTO else strategy, scheme.codec)
            self._ready_for(route)
            self.exchange.send_others_by(route)
            self._make_buckets(first_groups(self.gradients))

    def _watch_drift(self) -> None:
        """Compare the last iteration with the plan; now and then let rank 0 say whether to plan again."""
        timeline = self.measured_timeline() if self.world.rank == 0 else None
        if self._drift.asks_for_a_plan(timeline, self.world.ranks):
            assert self._decision is not None
            self._plan_together(self._decision.trace or self.settings.trace)
            plan = self._decision.plan
            self._drift.replanned(plan.hash, communication_seconds(plan.timeline))

    # Buckets

    def _make_buckets(self, groups: Sequence[Sequence[int]]) -> None:
        """Make a bucket of each group, or several where it has several types."""
        self._buckets: list[Bucket] = []
        self._places: dict[int, tuple[Bucket, int]] = {}  # of each gradient: its bucket, and its number there
        for group in groups:
            for dtype in dict.fromkeys(self.gradients[index].dtype for index in group):
                self._add_bucket([index for index in group if self.gradients[index].dtype == dtype], dtype)

    def _add_bucket(self, members: Sequence[int], dtype: str) -> None:
        names = [self.gradients[index].name for index in members]
        sizes = [self.gradients[index].numel for index in members]
        resolved = self.exchange.bucket(names, sizes, dtype)
        of = [self.gradients[index] for index in members]
        bucket = Bucket(tuple(members), resolved, partial(BucketMemory.of, of, self._zeros()), self._divides(resolved))
        self._buckets.append(bucket)
        self._places |= {index: (bucket, number) for number, index in enumerate(members)}

    def _new_memory(self, scheme: Scheme, on_nonfinite: str, scaler: Scaler | None) -> Memory:
        """Return what is kept between iterations."""
        return Memory(scheme, on_nonfinite, scaler)

    def _divides(self, bucket: ResolvedBucket) -> bool:
        """Whether gradients of a bucket are divided where they are copied: their sum is all that is made of them."""
        return self.exchange.only_sums(bucket)

    def _zeros(self) -> Zeros:
        """Return what makes flat memory for gradients of some sizes and one type."""
        return aligned_zeros


class _Loads:
    """Lets ranks load a state together: what one of them finds wrong is raised on all."""

    by_exchange = False

    def __init__(self, world: World) -> None:
        self._world = world

    def went_on(self) -> None:
        """Do nothing: loads are compared when they are made."""

    def agree(self, states: Sequence[State], complaint: PenstockError | None) -> None:
        """Raise the same on every rank unless all of them load the same states, and find nothing wrong with them."""
        mine = ("", checksum(states)) if complaint is None else (str(complaint), "")
        held = self._world.gather(mine, "loading an exchange state")
        for rank, (theirs, _) in enumerate(held):
            if theirs and any(other != theirs for other, _ in held):
                raise PlanError(f"on rank {rank}, {theirs}")
        if complaint is not None:
            raise complaint
        if len({digest for _, digest in held}) > 1:
            raise PlanError("ranks load different exchange states; give every rank the same: those of all of one run")
