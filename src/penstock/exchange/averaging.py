"""Averages one parcel over all ranks by its route, and keeps what a codec did not send for the next time.

A `Parcel` is made when a plan is adopted or buckets change. What it needs on every iteration (codec, residual, bounds
of its tensors) is found the first time that it is averaged and used again from then on.

Parcels may be averaged at the same time, each in a lane, which has a thread and a communicator of its own. Whatever
computes or touches what they share holds one lock, `computing`; a lane gives it up while it waits for messages.

In halves, each parcel is averaged by two calls: after the first its sums are finished, each on one rank, and the second
brings them to all ranks. Other parcels of the lane may come in between.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from typing import Any
from weakref import WeakSet

import numpy as np

from penstock.codecs.codec import NOTE, Codec
from penstock.codecs.feedback import DeferredResidual
from penstock.codecs.low_rank import Factoring, LowRank, Matrix
from penstock.codecs.registry import make_codec
from penstock.errors import CodecError, NonFiniteError
from penstock.exchange.arrays import Buffer, Device
from penstock.exchange.compression import NATIVE, check_aggregators
from penstock.exchange.factors import matrix_of
from penstock.exchange.momentum import sent_from
from penstock.exchange.parameter_state import Memory
from penstock.exchange.residuals import Layout
from penstock.exchange.traffic import Traffic
from penstock.plan import Route
from penstock.runtime.binding import copy_sources
from penstock.runtime.communicator import Communicator
from penstock.runtime.pages import move_to_huge_pages

DENSE = "ring"  # strategy of what travels dense beside a codec
Bounds = tuple[int, int]  # where a tensor lies in its parcel
VELOCITIES = ("float32", "float16", "bfloat16")  # gradients that momentum is kept for, as float32
HALVES_BLOCK_NUMEL = 512 * 1024  # dense, in halves: 61 MB took 4 ranks 0.47 s of processor time, in quarters 0.66
KEPT_CODECS = 16  # of different settings: a warm-up may have a density of its own for every iteration


@dataclass(slots=True, eq=False, weakref_slot=True)
class Parcel:
    """Gradients side by side in a bucket that travel by one route, and what averaging them needs, found once."""

    names: tuple[str, ...]  # of their parameters, in order
    sizes: tuple[int, ...]  # elements of each
    route: Route
    start: int = 0  # first element in the bucket
    dtype: str = "float32"
    dense_below: int = 0  # tensors of fewer elements travel dense, beside the others
    select: str = "tensor"  # "tensor": a codec sees each tensor by itself; else all together
    name: str = field(init=False)  # short, for pictures, as a plan's bucket has it
    bounds: tuple[Bounds, ...] = field(init=False)  # of each tensor
    small: tuple[Bounds, ...] = field(init=False)  # of those that travel dense
    parts: tuple[int, ...] = field(init=False)  # boundaries of what a codec sees by itself
    stop: int = field(init=False)
    # Found when it is first averaged, and again when one of them changes:
    codec: Codec | None = None
    device: Device = None  # where the codec works; None: in host memory
    is_queued: bool = False  # on a device, without a wait of the host
    call: Callable[..., Any] | None = None  # the all-reduce of encoded values, prepared, by its steps; or of factors
    dense_call: Callable[..., Iterator[None]] | None = None  # that of values as they are
    small_call: Callable[..., None] | None = None  # that of its small tensors
    lane: int = -1  # in which it was averaged last
    number: int = 0  # in its iteration: the codec draws other random numbers for each
    base: Codec | None = None  # what `codec` was made from; on a device, itself
    places: Buffer | None = None  # of the elements of small tensors
    in_place: bool = False  # the codec reads and writes the bucket itself, not a float32 copy
    keeps_residual: bool = False
    residual: DeferredResidual | None = None
    version: int = -1  # of the residuals that it was found among
    owes: bool = False  # something is owed that no residual of this codec keeps
    factored: "Factored | None" = None  # of a low-rank codec
    steps: Iterator[None] | None = None  # what is left to do, halfway
    sent_nbytes: int = 0  # by its first half

    def __post_init__(self) -> None:
        ends = tuple(accumulate(self.sizes, initial=0))
        self.name = self.names[0] if len(self.names) == 1 else f"{self.names[0]} .. {self.names[-1]}"
        self.bounds = tuple(pairwise(ends))
        self.small = tuple((start, stop) for start, stop in self.bounds if 0 < stop - start < self.dense_below)
        self.parts = ends if self.select == "tensor" else (0, ends[-1])
        self.stop = self.start + ends[-1]


@dataclass(slots=True, eq=False)
class Factored:
    """The matrices of a parcel that a low-rank codec sends as factors."""

    factoring: Factoring
    names: tuple[str, ...]  # of their parameters
    layouts: tuple[Layout, ...]
    were_finite: list[Callable[[], bool]] = field(default_factory=list)  # the last sums, where they are queued


class Averaging:
    """The ranks of one communicator, averaging parcels, several at a time where it has lanes."""

    def __init__(
        self,
        communicator: Communicator,
        memory: Memory,
        leaves_out: bool,
        lanes: int = 1,
        halves: bool = False,
        servers: int = 0,
    ) -> None:
        """`leaves_out`: parameters may lack a gradient in some iterations; what comes for them is thrown away.

        `lanes`: of parcels that are averaged at the same time, as far as the engine has them. `servers`: of the ranks
        that have no gradients, so that averages are over the others.
        """
        self.memory, self._leaves_out, self._arrays = memory, leaves_out, memory.arrays
        self._halves = halves
        self._communicator = communicator
        self._lanes = communicator.lanes(lanes)
        self.transports = [each.transport for each in self._lanes]  # of each lane
        self._rank = communicator.transport.rank
        self._servers = servers  # which need no device
        self._trained = communicator.transport.world_size - servers  # ranks whose gradients are averaged
        self._sent_before = communicator.transport.sent_nbytes
        self._codecs: dict[str, Codec] = {}
        self._resolved: WeakSet[Parcel] = WeakSet()  # those with a codec of their own, or with factors
        self._wide: dict[tuple[str, ...], Buffer] = {}  # 16-bit parcels in float32, where they are queued
        self._lock = communicator.computing  # queued buckets come from the backward pass's thread, others from lanes
        self._moved: set[tuple[int, int]] = set()  # to huge pages: address and bytes of buckets
        self._dense_nbytes = 0

    def parcel(self, names: Sequence[str], sizes: Sequence[int], route: Route, start: int, dtype: str) -> Parcel:
        """Return a parcel for these tensors, whose first element is element `start` of its bucket."""
        check_aggregators(route.strategy, self._servers)
        asked = self.memory.compression
        return Parcel(tuple(names), tuple(sizes), route, start, dtype, asked.dense_below, asked.select)

    def queues(self, parcel: Parcel, values: Buffer) -> bool:
        """Say whether a parcel can be averaged without a wait of the host: all of it is queued on its device."""
        memory = self.memory
        if self._communicator.messages is None or (device := self._arrays.device(values)) is None or not len(values):
            return False
        if memory.skips or self._leaves_out or memory.compression.momentum.is_used:
            return False
        if parcel.route.codec is None:
            return parcel.route == Route(NATIVE)
        spec = self._spec(parcel.route.codec, max(memory.iterations - 1, 0))
        if spec is None or (parcel.is_queued and parcel.base is self._codecs.get(spec)):
            return True
        with self._lock:
            codec = self._codec(spec)
        if isinstance(codec, LowRank):
            return parcel.route.strategy == NATIVE
        return self._communicator.queues(codec, device)

    def forget_programs(self) -> None:
        """Let the programs of parcels go that are no more: they keep residuals' memory of old buckets."""
        for lane in self._lanes:
            lane.forget_programs()

    def forget_nonfinite(self) -> None:
        """Drop what devices and codecs have yet to tell of values that were not finite; no parcel is under way."""
        with self._lock:
            if self._communicator.messages is not None:
                self._communicator.messages.bindings.settle()
            for codec in self._every_codec():
                codec.saw_nonfinite()
            for parcel in self._resolved:
                if parcel.factored is not None:
                    parcel.factored.were_finite = []

    def begin(self) -> None:
        """Begin an iteration: no parcel is under way."""
        with self._lock:
            self.memory.begin()

    def average(
        self,
        parcel: Parcel,
        values: Buffer,
        queued: bool = False,
        lane: int = 0,
        number: int = 0,
        is_divided: bool = False,
        sources: Sequence[Buffer] = (),
    ) -> None:
        """Replace `values`, a parcel's gradients, by their average over all ranks; in halves, the first half of it.

        `queued`: by what the current stream of its device is given. `lane`, and its `number` among the parcels of the
        iteration: the same on all ranks. `is_divided`: by the ranks already; of dense parcels without momentum.
        `sources`: where the gradients are instead, each flat, in host memory; they are read and not changed.
        """
        with self._lock:
            memory, momentum = self.memory, self.memory.compression.momentum
            if parcel.lane != lane or parcel.number != number:
                parcel.lane, parcel.number = lane, number
                parcel.call = parcel.dense_call = parcel.small_call = None
            self._dense_nbytes += 2 * (self._trained - 1) * values.nbytes // self._trained  # as `ring_nbytes`
            if momentum.factor and parcel.dtype not in VELOCITIES:
                raise CodecError(
                    f"momentum of {parcel.dtype} gradients; velocities are float32: wanted float32 or 16 bits; "
                    "leave momentum to the optimizer"
                )
            spec = parcel.route.codec if parcel.stop > parcel.start else None
            if spec is not None:
                if not memory.counted:
                    self._count()
                if memory.moments is not None or memory.compression.schedule is not None:
                    spec = self._spec(spec, memory.iterations - 1)
            if spec is not None:
                if parcel.call is None or parcel.base is not self._codecs.get(spec) or parcel.is_queued != queued:
                    self._resolve(parcel, spec, values, queued)
                if parcel.version != memory.residuals.version:
                    self._find_residual(parcel)
            if sources and (spec is None or not self._reads_sources(parcel)):
                copy_sources(values, sources)
                sources = ()
            if momentum.clip is not None and not momentum.clips_model:
                for start, stop in parcel.bounds:
                    self.clip([values[start:stop]])
            if spec is None:
                parcel.steps = self._average_dense(parcel, values, queued, is_divided)
            elif parcel.factored is not None:  # sums of factors are asked for in between: it has no halves
                parcel.steps = None
                self._average_factors(parcel, parcel.factored, values, queued)
                return
            elif memory.moments is not None:
                parcel.steps = self._average_moments(parcel, values, queued)
            else:
                parcel.steps = self._average_compressed(parcel, values, queued, sources)
            next(parcel.steps, None)

    def _reads_sources(self, parcel: Parcel) -> bool:
        """Say whether a parcel's codec reads gradients where they are, as nothing else needs or changes them before."""
        memory = self.memory
        if memory.compression.momentum.is_used or memory.moments is not None or self._leaves_out or parcel.small:
            return False
        return parcel.factored is None and parcel.in_place and parcel.residual is not None

    def go_on(self, parcel: Parcel) -> None:
        """Carry out the second half of a parcel, on the thread of its lane."""
        with self._lock:
            if parcel.steps is not None:
                next(parcel.steps, None)

    def _spec(self, planned: str, iteration: int) -> str | None:
        """Return the codec of an iteration for a parcel whose plan says `planned`; None: it travels dense."""
        moments = self.memory.moments
        return self.memory.compression.codec_at(planned, iteration) if moments is None else moments.codec(planned)

    def clip(self, gradients: Sequence[Buffer]) -> None:
        """Scale what this rank adds to the average, all of `gradients` by one factor, where their norm is too large.

        What a rank adds is its gradient over the number of ranks, and not scaled for 16 bits as gradients are here.
        """
        momentum, scale = self.memory.compression.momentum, self._trained * self.memory.loss_scale
        factor = momentum.shrinks_by(self._arrays.norm(gradients) / scale, self._trained)
        if factor != 1.0:
            for each in gradients:
                each *= factor

    def traffic(self) -> Traffic:
        """Return what this rank has sent so far."""
        messages = self._communicator.messages
        queued = 0 if messages is None else messages.sent_nbytes
        sent = sum(each.sent_nbytes for each in self.transports) - self._sent_before
        return Traffic(sent + queued, self._dense_nbytes)

    def _count(self) -> None:
        """Count this iteration as one that compresses, and tell codecs, which draw random numbers by it."""
        self.memory.count()
        for codec in self._every_codec():
            codec.begin(self.memory.iterations)

    def _every_codec(self) -> list[Codec]:
        """Return the codecs that are kept, and those of parcels that have one of their own."""
        return [*self._codecs.values(), *(each.codec for each in self._resolved if each.codec is not None)]

    def _outside(self, call: Callable[..., object], *operands: Any, **options: Any) -> None:
        """Make a call that waits for messages, without the lock, which this thread holds."""
        self._lock.release()
        try:
            call(*operands, **options)
        finally:
            self._lock.acquire()

    def _resolve(self, parcel: Parcel, spec: str, values: Buffer, queued: bool) -> None:
        """Find what a parcel needs with the codec of this iteration."""
        there = self._arrays.device(values)
        parcel.base, parcel.is_queued = self._codec(spec), queued
        parcel.codec, parcel.factored = parcel.base, None
        if isinstance(parcel.codec, LowRank):
            self._resolve_factors(parcel, parcel.codec, there)
            return
        if there is None:
            parcel.codec = parcel.base.for_bucket(parcel.number)
            parcel.codec.begin(self.memory.iterations)
            self._resolved.add(parcel)
        self._outside(self._prepare, parcel)
        parcel.device = there if self._works_there(parcel.codec, there) else None
        parcel.in_place = parcel.dtype == "float32" and there == parcel.device
        parcel.version, parcel.places = -1, None
        if parcel.small:
            places = np.concatenate([np.arange(start, stop) for start, stop in parcel.small])
            parcel.places = self._arrays.indices(places, parcel.device)
        if parcel.in_place and there is None:
            self._move_once(self._arrays.float32(values, None))

    def _works_there(self, codec: Codec, device: Device) -> bool:
        """Say whether a codec works on a device: not where its payloads, which lie otherwise there, go to servers."""
        varies_for_servers = self._servers > 0 and codec.capabilities.variable_size
        return device is not None and not varies_for_servers and codec.on_device(device) is not None

    def _resolve_factors(self, parcel: Parcel, codec: LowRank, there: Device) -> None:
        """Find what a parcel needs with a low-rank codec, which works wherever the gradients are."""
        matrices, kept, dense = list[Matrix](), list[tuple[str, Layout]](), list[Bounds]()
        for name, bounds in zip(parcel.names, parcel.bounds, strict=True):
            layout = self.memory.layout(name)
            if layout is None:
                raise CodecError(
                    f"codec {parcel.route.codec!r} factors matrices, and the shape of {name!r} is not known; call "
                    "memory.know({name: Layout.contiguous(shape), ...}) of the exchange's memory first, on all ranks"
                )
            matrix = None if bounds in parcel.small else matrix_of(layout, bounds[0], codec)
            if matrix is None:
                dense.append(bounds)
            else:
                matrices.append(matrix)
                kept.append((name, layout))
        names, layouts = tuple(name for name, _ in kept), tuple(layout for _, layout in kept)
        parcel.factored = Factored(Factoring(codec, matrices, dense), names, layouts)
        self._resolved.add(parcel)
        parcel.device, parcel.in_place, parcel.keeps_residual = there, parcel.dtype == "float32", True
        parcel.version, parcel.places = -1, None
        if parcel.is_queued:
            parcel.call = self._communicator.messages.all_reduce
        else:
            self._outside(self._prepare_factors, parcel)

    def _prepare_factors(self, parcel: Parcel) -> None:
        """Find what sums a parcel's factors over all ranks."""
        parcel.call = self._lanes[parcel.lane].prepare_all_reduce(parcel.route.strategy).run

    def _prepare(self, parcel: Parcel) -> None:
        """Find what sums a parcel's values over all ranks by its route; it may ask all ranks where they are."""
        route, communicator, codec = parcel.route, self._lanes[parcel.lane], parcel.codec
        assert codec is not None
        call = communicator.prepare_all_reduce(
            route.strategy, codec, parcel.parts, not parcel.is_queued, self._halves, **route.options
        )
        parcel.call = partial(call.steps, lands=False) if parcel.is_queued else call.steps
        encodes = communicator.encodes(route.strategy)  # else what is owed goes to the rank that does
        parcel.keeps_residual = codec.takes_feedback and encodes

    def _prepare_dense(self, parcel: Parcel) -> None:
        """Find what sums a parcel's values over all ranks as they are."""
        route = Route(DENSE) if parcel.route.codec else parcel.route
        communicator, options = self._lanes[parcel.lane], route.options
        if self._halves:  # few blocks: what the interpreter does for each is taken from computation all the time
            options |= {"block_numel": HALVES_BLOCK_NUMEL}
        parcel.dense_call = communicator.prepare_all_reduce(route.strategy, halves=self._halves, **options).steps

    def _find_residual(self, parcel: Parcel) -> None:
        """Find a parcel's residual, or whether it owes something that must be paid since none is kept."""
        residuals = self.memory.residuals
        if parcel.keeps_residual:
            parcel.residual = residuals.deferred(parcel.names, parcel.sizes, parcel.device)
        else:
            parcel.residual, parcel.owes = None, residuals.owes(parcel.names)
        parcel.version = residuals.version

    def _average_moments(self, parcel: Parcel, values: Buffer, queued: bool) -> Iterator[None]:
        """Average the momentum of an optimizer that has it sent instead of gradients."""
        moments = self.memory.moments
        assert moments is not None
        named = zip(parcel.names, parcel.bounds, strict=True)
        parts = [(name, values[slice(*each)]) for name, each in named if each not in parcel.small]
        moments.before(parts, self.memory.loss_scale)
        yield from self._average_compressed(parcel, values, queued)
        self._then(queued, partial(moments.after, parts))

    def _average_dense(self, parcel: Parcel, values: Buffer, queued: bool, is_divided: bool) -> Iterator[None]:
        given, with_momentum = values, bool(self.memory.compression.momentum.factor)
        if with_momentum:
            values = self._arrays.float32(values, None)
        if not is_divided:
            values /= self._trained
        absent = self._absent(values, parcel)
        self._gain_momentum(values, parcel, absent, None)
        self._add_owed(values, parcel, absent)
        if queued:
            self._communicator.messages.all_reduce(values)
        else:
            if parcel.dense_call is None:
                self._outside(self._prepare_dense, parcel)
            assert parcel.dense_call is not None
            steps = parcel.dense_call(values)
            self._outside(next, steps, None)
            if self._halves:
                yield
                self._outside(next, steps, None)
        if with_momentum:
            self._arrays.copy(given, values)
        self._note_if_nonfinite(given)

    def _average_compressed(
        self, parcel: Parcel, values: Buffer, queued: bool, sources: Sequence[Buffer] = ()
    ) -> Iterator[None]:
        """Send what a codec makes of the gradients, as float32: errors of 16-bit ones are kept in full.

        Those on a GPU stay there with their residuals where the codec works there; others go through host memory.
        """
        memory, codec, given = self.memory, parcel.codec, values
        assert codec is not None
        assert parcel.call is not None
        if parcel.in_place:
            values = np.asarray(given) if parcel.device is None else given  # of the same memory
        elif queued:
            values = self._float32(parcel, given)
        else:
            values = self._arrays.float32(given, parcel.device)
        scale, velocity = 1 / self._trained, None
        absent = self._absent(values, parcel) if self._leaves_out else []
        if memory.compression.momentum.factor:
            values *= scale
            scale = 1.0
            velocity = self._gain_momentum(values, parcel, absent, parcel.device)
        small = None
        if parcel.places is not None:  # they leave zeros, which cost a codec little
            small = values[parcel.places] * scale
            values[parcel.places] = 0.0
        if parcel.residual is None and parcel.owes:
            values *= scale
            scale = 1.0
            self._add_owed(values, parcel, absent)
        residual = parcel.residual
        aside = self._set_aside(residual, absent) if residual is not None and absent else []
        kept = residual if residual is None or parcel.device is None else residual.memory  # nothing is put off there
        steps = parcel.call(values, residual=kept, scale=scale, sources=sources)
        self._lock.release()  # as `_outside` does
        try:
            next(steps, None)
        finally:
            self._lock.acquire()
        if self._halves:
            yield
            self._outside(next, steps, None)
        if velocity is not None and residual is not None:
            memory.compression.momentum.after(velocity, self._sent(residual.values(), parcel, absent))
        for start, kept in aside:
            assert residual is not None
            residual.values()[start : start + len(kept)] += kept
        if codec.saw_nonfinite():
            self._on_nonfinite(values, parcel)
        if small is not None or not parcel.in_place or memory.skips:
            self._then(queued, partial(self._arrive, parcel, values, given, small, queued))

    def _average_factors(self, parcel: Parcel, factored: Factored, given: Buffer, queued: bool) -> None:
        """Send low-rank factors of the gradients, which are summed as float32; residuals keep the rest."""
        memory, call = self.memory, parcel.call
        assert isinstance(parcel.codec, LowRank)
        assert call is not None
        self._check_last_sums(parcel, factored)
        values = self._float32(parcel, given) if queued and not parcel.in_place else given
        values = values if queued else self._arrays.float32(values, parcel.device)
        values *= 1 / self._trained
        absent = self._absent(values, parcel)
        self._gain_momentum(values, parcel, absent, parcel.device)
        assert parcel.residual is not None
        aside = self._set_aside(parcel.residual, absent)
        total = parcel.residual.values()
        total += values
        factoring, rank = factored.factoring, parcel.codec.rank
        matrices = zip(factored.names, factored.layouts, factoring.matrices, strict=True)
        before = [memory.factors.of(name, layout, each, factoring, rank, values) for name, layout, each in matrices]
        add_up = call if queued else partial(self._outside, call)
        is_finite = partial(self._check_next_time, factored) if queued else self._arrays.is_finite
        after = factoring.average(total, values, before, add_up, is_finite)
        for start, kept in aside:
            total[start : start + len(kept)] += kept
        if after is None:
            self._on_nonfinite(values, parcel)
        else:
            memory.factors.keep(factored.names, factored.layouts, after)
        if not parcel.in_place or memory.skips:
            self._arrive(parcel, values, given, None, queued)

    def _check_last_sums(self, parcel: Parcel, factored: Factored) -> None:
        """Raise where the last sums of a parcel, which were queued on its device, were not finite."""
        asked, factored.were_finite = factored.were_finite, []
        if not all(each() for each in asked):
            self._on_nonfinite(np.zeros(0), parcel)

    def _check_next_time(self, factored: Factored, total: Buffer) -> bool:
        """Have a sum on a device looked at, for when its parcel comes again."""
        factored.were_finite.append(self._arrays.finite_later(total))
        return True

    def _arrive(self, parcel: Parcel, values: Buffer, given: Buffer, small: Buffer | None, queued: bool) -> None:
        """Put what a codec sent of a parcel and what travels dense back to where the gradients were given."""
        if small is not None:
            self._average_small(parcel, small, queued)
            values[parcel.places] += small  # to what a codec sent of an older debt
        if not parcel.in_place:
            self._arrays.copy(given, values)
        if self.memory.skips:
            self._note_if_nonfinite(given)
        if parcel.residual is not None and parcel.dtype != "float32" and self._rank == 0:
            self._keep_rounding(parcel.residual, values, given)

    def _then(self, queued: bool, work: Callable[[], None]) -> None:
        """Do what comes behind the exchange of a parcel: once all of that is queued, or now."""
        if queued:
            self._communicator.messages.behind(work)
        else:
            work()

    def _add_owed(self, values: Buffer, parcel: Parcel, absent: Sequence[Bounds]) -> None:
        """Add what another codec left of these gradients: where no residual is kept, all of it is sent now.

        Not of absent ones, whose result is thrown away.
        """
        for name, bounds in zip(parcel.names, parcel.bounds, strict=True):
            start, stop = bounds
            if bounds not in absent and (owed := self.memory.residuals.take(name, stop - start)) is not None:
                self._arrays.add(values[start:stop], owed)

    def _note_if_nonfinite(self, total: Buffer) -> None:
        """Note a sum that makes a gradient scaler skip this step; it is the same on all ranks."""
        if self.memory.skips and not self._arrays.is_finite(total):
            self.memory.has_nonfinite = True

    def _float32(self, parcel: Parcel, given: Buffer) -> Buffer:
        """Return a parcel in float32, in memory that stays where it is, as what is queued there must."""
        if parcel.names not in self._wide:
            self._wide = {key: old for key, old in self._wide.items() if not set(key) & set(parcel.names)}
            self._wide[parcel.names] = self._arrays.zeros(len(given), parcel.device)
        self._arrays.copy(self._wide[parcel.names], given)
        return self._wide[parcel.names]

    def _move_once(self, values: Buffer) -> None:
        """Have a bucket that comes for the first time on huge pages: codecs go over it several times an iteration."""
        place = values.__array_interface__["data"][0], values.nbytes
        if place not in self._moved:
            self._moved.add(place)
            move_to_huge_pages(*place)

    def _gain_momentum(self, values: Buffer, parcel: Parcel, absent: Sequence[Bounds], device: Device) -> Buffer | None:
        """Replace gradients by what momentum makes of them, where it is not left to the optimizer.

        Those that are absent stay so, and keep their velocity for the next time.
        """
        momentum = self.memory.compression.momentum
        if not momentum.factor:
            return None
        velocities = self.memory.velocities
        velocity = velocities.bucket(parcel.names, parcel.sizes, device)
        kept = [(start, stop, velocities.copied(velocity[start:stop])) for start, stop in absent]
        momentum.before(values, velocity)
        for start, stop, before in kept:
            values[start:stop], velocity[start:stop] = 0.0, before
        return velocity

    def _sent(self, residual: Buffer, parcel: Parcel, absent: Sequence[Bounds]) -> Buffer:
        """Return where values left for good; what travels dense or not at all keeps its velocity."""
        sent = sent_from(residual)
        for start, stop in (*parcel.small, *absent):
            sent[start:stop] = False
        return sent

    def _average_small(self, parcel: Parcel, values: Buffer, queued: bool) -> None:
        """Sum a parcel's small tensors, float32, over all ranks as they are."""
        if queued:
            self._communicator.messages.all_reduce(values)
        else:
            if parcel.small_call is None:
                parcel.small_call = self._lanes[parcel.lane].prepare_all_reduce(DENSE).run
            self._outside(parcel.small_call, values)

    def _absent(self, values: Buffer, parcel: Parcel) -> list[Bounds]:
        """Return which tensors have no gradient; one that is all zeros counts as none: it only waits."""
        if not self._leaves_out:
            return []
        return [each for each in parcel.bounds if not values[slice(*each)].any()]

    def _set_aside(self, residual: DeferredResidual, absent: Sequence[Bounds]) -> list[tuple[int, Buffer]]:
        """Take out of the residual what absent tensors owe, so that it is not sent now; return where each belongs."""
        found = []
        for start, stop in absent:
            kept = residual.values()[start:stop]
            found.append((start, self.memory.residuals.copied(kept)))
            kept[:] = 0.0
        return found

    def _keep_rounding(self, residual: DeferredResidual, average: Buffer, applied: Buffer) -> None:
        """Keep what 16 bits do not hold of an average; all ranks apply the same, so one of them keeps it.

        What is put off is taken off this memory later: that may be in any order.
        """
        rounding = average - self._arrays.float32(applied, self._arrays.device(average))
        rounding[~(abs(rounding) < inf)] = 0.0  # also NaN
        memory: Buffer = residual.memory
        memory += rounding

    def _on_nonfinite(self, values: Buffer, parcel: Parcel) -> None:
        self.memory.has_nonfinite = True
        if not self.memory.skips:
            self.memory.fail()
            parts = zip(parcel.names, parcel.bounds, strict=True)
            named = ", ".join(repr(name) for name, each in parts if not self._arrays.is_finite(values[slice(*each)]))
            whose = named or f"{parcel.name}, in the iteration before,"  # heard of late, from a device
            raise NonFiniteError(
                f"the gradient of {whose} holds NaN or infinity on some rank, or what {parcel.route.codec} cannot hold;"
                ' fix the loss, or pass on_nonfinite="skip" if a gradient scaler skips such steps'
            )

    def _codec(self, spec: str) -> Codec:
        codec = self._codecs.pop(spec, None)
        if codec is None:
            later = not self.memory.skips  # which must know before the step is taken
            codec = make_codec(spec, self._rank, on_nonfinite=NOTE, defers_nonfinite_check=later)
            codec.begin(self.memory.iterations)
        self._codecs[spec] = codec  # those used last are last
        if len(self._codecs) > KEPT_CODECS:
            del self._codecs[next(iter(self._codecs))]
        return codec
