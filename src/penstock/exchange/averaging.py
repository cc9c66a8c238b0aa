"""Averages one parcel over all ranks by its route, and keeps what a codec did not send for the next time.

A `Parcel` is made when a plan is adopted or buckets change. What it needs on every iteration (codec, residual, bounds
of its tensors) is found the first time that it is averaged and used again from then on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from threading import Lock

import numpy as np

from penstock.codecs.codec import NOTE, Codec
from penstock.codecs.feedback import PutOff
from penstock.codecs.registry import make_codec
from penstock.errors import CodecError, NonFiniteError
from penstock.exchange.arrays import Buffer, Device
from penstock.exchange.compression import NATIVE
from penstock.exchange.momentum import sent_from
from penstock.exchange.parameter_state import Memory
from penstock.exchange.traffic import Traffic
from penstock.plan import Route
from penstock.runtime.communicator import Communicator
from penstock.runtime.pages import move_to_huge_pages

DENSE = "ring"  # strategy of what travels dense beside a codec
Bounds = tuple[int, int]  # where a tensor lies in its parcel
VELOCITIES = ("float32", "float16", "bfloat16")  # gradients that momentum is kept for, as float32
KEPT_CODECS = 16  # of different settings: a warm-up may have a density of its own for every iteration


@dataclass(slots=True, eq=False)
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
    call: Callable[..., None] | None = None  # the all-reduce of encoded values, prepared
    dense_call: Callable[..., None] | None = None  # that of values as they are
    places: Buffer | None = None  # of the elements of small tensors
    in_place: bool = False  # the codec reads and writes the bucket itself, not a float32 copy
    keeps_residual: bool = False
    residual: PutOff | None = None
    version: int = -1  # of the residuals that it was found among
    pays: bool = False  # something is owed that no residual of this codec keeps

    def __post_init__(self) -> None:
        ends = tuple(accumulate(self.sizes, initial=0))
        self.name = self.names[0] if len(self.names) == 1 else f"{self.names[0]} .. {self.names[-1]}"
        self.bounds = tuple(pairwise(ends))
        self.small = tuple((start, stop) for start, stop in self.bounds if 0 < stop - start < self.dense_below)
        self.parts = ends if self.select == "tensor" else (0, ends[-1])
        self.stop = self.start + ends[-1]


class Averaging:
    """The ranks of one communicator, averaging parcels one after the other."""

    def __init__(self, communicator: Communicator, memory: Memory, leaves_out: bool) -> None:
        """`leaves_out`: parameters may lack a gradient in some iterations; what comes for them is thrown away."""
        self.memory, self._leaves_out, self._arrays = memory, leaves_out, memory.arrays
        self._communicator = communicator
        self._rank, self._world_size = communicator.transport.rank, communicator.transport.world_size
        self._sent_before = communicator.transport.sent_nbytes
        self._codecs: dict[str, Codec] = {}
        self._wide: dict[tuple[str, ...], Buffer] = {}  # 16-bit parcels in float32, where they are queued
        self._lock = Lock()  # queued buckets come from the backward pass's thread, others from the communication thread
        self._moved: set[tuple[int, int]] = set()  # to huge pages: address and bytes of buckets
        self._dense_nbytes = 0

    def parcel(self, names: Sequence[str], sizes: Sequence[int], route: Route, start: int, dtype: str) -> Parcel:
        """Return a parcel for these tensors, whose first element is element `start` of its bucket."""
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
        if spec is None:
            return True
        with self._lock:
            codec = self._codec(spec)
        return self._communicator.queues(codec, device)

    def average(self, parcel: Parcel, values: Buffer, is_first: bool = False, queued: bool = False) -> None:
        """Replace `values`, a parcel's gradients, by their average over all ranks.

        `is_first`: the iteration begins with it. `queued`: by what the current stream of its device is given.
        """
        with self._lock:
            memory, momentum = self.memory, self.memory.compression.momentum
            if is_first:
                memory.begin()
            if momentum.clip is not None and momentum.clips_tensors:
                for start, stop in parcel.bounds:
                    self.clip([values[start:stop]])
            self._dense_nbytes += 2 * (self._world_size - 1) * values.nbytes // self._world_size  # as `ring_nbytes`
            if momentum.factor and parcel.dtype not in VELOCITIES:
                raise CodecError(
                    f"momentum of {parcel.dtype} gradients; velocities are float32: wanted float32 or 16 bits; "
                    "leave momentum to the optimizer"
                )
            if parcel.route.codec is None or parcel.stop == parcel.start:
                self._average_dense(parcel, values, queued)
                return
            if not memory.counted:
                self._count()
            spec: str | None = parcel.route.codec
            if memory.moments is not None or memory.compression.schedule is not None:
                spec = self._spec(parcel.route.codec, memory.iterations - 1)
            if spec is None:
                self._average_dense(parcel, values, queued)
                return
            if parcel.call is None or parcel.codec is not self._codecs.get(spec) or parcel.is_queued != queued:
                self._resolve(parcel, spec, values, queued)
            if memory.moments is None:
                self._average_compressed(parcel, values, queued)
            else:
                self._average_moments(parcel, values, queued)

    def _spec(self, planned: str, iteration: int) -> str | None:
        """Return the codec of an iteration for a parcel whose plan says `planned`; None: it travels dense."""
        moments = self.memory.moments
        return self.memory.compression.codec_at(planned, iteration) if moments is None else moments.codec(planned)

    def clip(self, gradients: Sequence[Buffer]) -> None:
        """Scale what this rank adds to the average, all of `gradients` by one factor, where their norm is too large.

        What a rank adds is its gradient over the number of ranks, and not scaled for 16 bits as gradients are here.
        """
        momentum, scale = self.memory.compression.momentum, self._world_size * self.memory.loss_scale
        factor = momentum.shrinks_by(self._arrays.norm(gradients) / scale, self._world_size)
        if factor != 1.0:
            for each in gradients:
                each *= factor

    def traffic(self) -> Traffic:
        """Return what this rank has sent so far."""
        messages = self._communicator.messages
        queued = 0 if messages is None else messages.sent_nbytes
        sent = self._communicator.transport.sent_nbytes - self._sent_before
        return Traffic(sent + queued, self._dense_nbytes)

    def _count(self) -> None:
        """Count this iteration as one that compresses, and tell codecs, which draw random numbers by it."""
        self.memory.count()
        for codec in self._codecs.values():
            codec.begin(self.memory.iterations)

    def _resolve(self, parcel: Parcel, spec: str, values: Buffer, queued: bool) -> None:
        """Find what a parcel needs with the codec of this iteration."""
        parcel.codec, parcel.is_queued = self._codec(spec), queued
        parcel.call = self._prepared(parcel.route, parcel.codec, parcel.parts, by_host=not queued)
        there = self._arrays.device(values)
        parcel.device = there if there is not None and parcel.codec.on_device(there) is not None else None
        parcel.in_place = parcel.dtype == "float32" and there == parcel.device
        encodes = self._communicator.encodes(parcel.route.strategy)  # else what is owed goes to the rank that does
        parcel.keeps_residual = parcel.codec.takes_feedback and encodes
        parcel.version, parcel.places = -1, None
        if parcel.small:
            places = np.concatenate([np.arange(start, stop) for start, stop in parcel.small])
            parcel.places = self._arrays.indices(places, parcel.device)
        if parcel.in_place and there is None:
            self._move_once(self._arrays.float32(values, None))

    def _prepared(
        self, route: Route, codec: Codec | None = None, parts: Sequence[int] | None = None, by_host: bool = False
    ) -> Callable[..., None]:
        """Return what sums values over all ranks by a route, for every iteration to come."""
        return self._communicator.prepare_all_reduce(route.strategy, codec, parts, by_host, **route.options).run

    def _find_residual(self, parcel: Parcel) -> None:
        """Find a parcel's residual, or whether it owes something that must be paid since none is kept."""
        residuals = self.memory.residuals
        if parcel.keeps_residual:
            parcel.residual = residuals.deferred(parcel.names, parcel.sizes, parcel.device)
        else:
            parcel.residual, parcel.pays = None, residuals.owes(parcel.names)
        parcel.version = residuals.version

    def _average_moments(self, parcel: Parcel, values: Buffer, queued: bool) -> None:
        """Average the momentum of an optimizer that has it sent instead of gradients."""
        moments = self.memory.moments
        assert moments is not None
        named = zip(parcel.names, parcel.bounds, strict=True)
        parts = [(name, values[slice(*each)]) for name, each in named if each not in parcel.small]
        moments.before(parts, self.memory.loss_scale)
        self._average_compressed(parcel, values, queued)
        moments.after(parts)

    def _average_dense(self, parcel: Parcel, values: Buffer, queued: bool) -> None:
        given, with_momentum = values, bool(self.memory.compression.momentum.factor)
        if with_momentum:
            values = self._arrays.float32(values, None)
        values /= self._world_size
        absent = self._absent(values, parcel)
        self._gain_momentum(values, parcel, absent, None)
        self._pay(values, parcel, absent)
        if queued:
            self._communicator.messages.all_reduce(values)
        else:
            if parcel.dense_call is None:
                parcel.dense_call = self._prepared(Route(DENSE) if parcel.route.codec else parcel.route)
            parcel.dense_call(values)
        if with_momentum:
            self._arrays.copy(given, values)
        self._look(given)

    def _average_compressed(self, parcel: Parcel, values: Buffer, queued: bool) -> None:
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
        scale, velocity, absent = 1 / self._world_size, None, list[Bounds]()
        if memory.compression.momentum.factor:
            values *= scale
            scale = 1.0
        if self._leaves_out:
            absent = self._absent(values, parcel)
        if memory.compression.momentum.factor:
            velocity = self._gain_momentum(values, parcel, absent, parcel.device)
        small = None
        if parcel.places is not None:  # they leave zeros, which cost a codec little
            small = values[parcel.places] * scale
            values[parcel.places] = 0.0
        if parcel.version != memory.residuals.version:
            self._find_residual(parcel)
        if parcel.residual is None and parcel.pays:
            values *= scale
            scale = 1.0
            self._pay(values, parcel, absent)
        residual = parcel.residual
        aside = self._set_aside(residual, absent) if residual is not None and absent else []
        if residual is not None and parcel.device is not None:  # nothing is put off there
            parcel.call(values, residual=residual.memory, scale=scale)
        else:
            parcel.call(values, residual=residual, scale=scale)
        if velocity is not None and residual is not None:
            memory.compression.momentum.after(velocity, self._sent(residual.values(), parcel, absent))
        for start, kept in aside:
            assert residual is not None
            residual.values()[start : start + len(kept)] += kept
        if small is not None:
            self._average_dense_message(small, queued)
            values[parcel.places] += small  # to what a codec sent of an older debt
        if codec.saw_nonfinite():
            self._on_nonfinite(values, parcel)
        if not parcel.in_place:
            self._arrays.copy(given, values)
        if memory.skips:
            self._look(given)
        if residual is not None and parcel.dtype != "float32" and self._rank == 0:
            self._keep_rounding(residual, values, given)

    def _pay(self, values: Buffer, parcel: Parcel, absent: Sequence[Bounds]) -> None:
        """Add what another codec left of these gradients: where no residual is kept, all of it is sent now.

        Not of absent ones, whose result is thrown away.
        """
        for name, bounds in zip(parcel.names, parcel.bounds, strict=True):
            start, stop = bounds
            if bounds not in absent and (owed := self.memory.residuals.take(name, stop - start)) is not None:
                self._arrays.add(values[start:stop], owed)

    def _look(self, total: Buffer) -> None:
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

    def _average_dense_message(self, values: Buffer, queued: bool) -> None:
        """Sum float32 values over all ranks as they are."""
        if queued:
            self._communicator.messages.all_reduce(values)
        else:
            self._communicator.all_reduce(values, strategy=DENSE)

    def _absent(self, values: Buffer, parcel: Parcel) -> list[Bounds]:
        """Return which tensors have no gradient; one that is all zeros counts as none: it only waits."""
        if not self._leaves_out:
            return []
        return [each for each in parcel.bounds if not values[slice(*each)].any()]

    def _set_aside(self, residual: PutOff, absent: Sequence[Bounds]) -> list[tuple[int, Buffer]]:
        """Take out of the residual what absent tensors owe, so that it is not sent now; return where each belongs."""
        found = []
        for start, stop in absent:
            kept = residual.values()[start:stop]
            found.append((start, self.memory.residuals.copied(kept)))
            kept[:] = 0.0
        return found

    def _keep_rounding(self, residual: PutOff, average: Buffer, applied: Buffer) -> None:
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
