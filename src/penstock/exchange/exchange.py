"""Averages one bucket over all ranks by its route, and keeps what a codec did not send for the next time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import Lock

import torch

from penstock.codecs.codec import NOTE, Codec
from penstock.codecs.feedback import PutOff
from penstock.codecs.registry import make_codec
from penstock.errors import CodecError, NonFiniteError
from penstock.exchange.compression import NATIVE
from penstock.exchange.momentum import sent_from
from penstock.exchange.parameter_state import Memory
from penstock.exchange.residuals import HOST, Room, copied
from penstock.exchange.traffic import CountingTransport, Traffic, ring_nbytes
from penstock.plan import Route
from penstock.runtime.communicator import Communicator
from penstock.runtime.device.small import SmallTensors
from penstock.runtime.pages import move_to_huge_pages

DENSE = "ring"  # strategy of what travels dense beside a codec
Bounds = tuple[int, int]  # where a tensor lies in its bucket
VELOCITIES = (torch.float32, torch.float16, torch.bfloat16)  # gradients that momentum is kept for, as float32
KEPT_CODECS = 16  # of different settings: a warm-up may have a density of its own for every iteration


@dataclass(frozen=True, slots=True)
class Parcel:
    """A bucket on its way: its values, and which parameters' gradients they are, in order."""

    values: torch.Tensor  # flat
    names: tuple[str, ...]
    sizes: tuple[int, ...]  # elements of each
    route: Route
    is_first: bool = False  # of its iteration

    @property
    def name(self) -> str:
        """A short name for pictures, as a plan's bucket has it."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} .. {self.names[-1]}"


class Exchange:
    """The ranks of one communicator, exchanging buckets one after the other."""

    def __init__(
        self, communicator: Communicator, transport: CountingTransport, memory: Memory, leaves_out: bool
    ) -> None:
        """`leaves_out`: parameters may lack a gradient in some iterations; torch throws away what comes for them."""
        self.memory, self._leaves_out = memory, leaves_out
        self._communicator, self._transport = communicator, transport
        self._world_size = transport.world_size
        self._codecs: dict[str, Codec] = {}
        self._wide: dict[tuple[str, ...], torch.Tensor] = {}  # 16-bit buckets in float32, where they are queued
        self._small_there: dict[tuple[tuple[int, ...], torch.device], SmallTensors | None] = {}  # by sizes of a bucket
        self._lock = Lock()  # queued buckets come from the backward pass's thread, others from the communication thread
        self._moved: set[tuple[int, int]] = set()  # to huge pages: address and bytes of buckets
        self._dense_nbytes = 0

    def queues(self, parcel: Parcel) -> bool:
        """Say whether a bucket can be averaged without a wait of the host: all of it is queued on its device."""
        memory = self.memory
        waits = memory.skips or self._leaves_out or memory.compression.momentum.is_used
        if self._communicator.messages is None or waits or not parcel.values.is_cuda or not parcel.values.numel():
            return False
        if parcel.route.codec is None:
            return parcel.route == Route(NATIVE)
        spec = self._spec(parcel.route.codec, max(memory.iterations - 1, 0))
        if spec is None:
            return True
        with self._lock:
            codec = self._codec(spec)
        return self._communicator.queues(codec, parcel.values.device)

    def average(self, parcel: Parcel, queued: bool = False) -> None:
        """Replace the values by their average over all ranks; `queued`: by what the current stream is given."""
        with self._lock:
            self._average(parcel, queued)

    def _average(self, parcel: Parcel, queued: bool) -> None:
        if parcel.is_first:
            self.memory.begin()
        if self.memory.compression.momentum.clips_tensors:
            for part in torch.split(parcel.values, list(parcel.sizes)):
                self.clip([part])
        self._dense_nbytes += ring_nbytes(parcel.values.nbytes, self._world_size)
        if self.memory.compression.momentum.factor and parcel.values.dtype not in VELOCITIES:
            raise CodecError(
                f"momentum of {parcel.values.dtype} gradients; velocities are float32: wanted float32 or 16 bits; "
                "leave momentum to the optimizer"
            )
        if parcel.route.codec is None or not parcel.values.numel():
            self._average_dense(parcel, queued)
        else:
            if self.memory.count():
                for codec in self._codecs.values():
                    codec.begin(self.memory.iterations)
            self._average_by_codec(parcel, parcel.route.codec, queued)

    def _average_by_codec(self, parcel: Parcel, planned: str, queued: bool) -> None:
        """Average by the codec of this iteration; an optimizer may have its momentum sent instead of gradients."""
        moments, spec = self.memory.moments, self._spec(planned, self.memory.iterations - 1)
        if spec is None:
            self._average_dense(parcel, queued)
        elif moments is None:
            self._average_compressed(parcel, self._codec(spec), queued)
        else:
            small, bounds = self._small(parcel.sizes), pairwise(accumulate(parcel.sizes, initial=0))
            parts = [
                (name, parcel.values[slice(*each)])
                for name, each in zip(parcel.names, bounds, strict=True)
                if each not in small
            ]
            moments.before(parts, self.memory.loss_scale)
            self._average_compressed(parcel, self._codec(spec), queued)
            moments.after(parts)

    def _spec(self, planned: str, iteration: int) -> str | None:
        """Return the codec of an iteration for a bucket whose plan says `planned`; None: it travels dense."""
        moments = self.memory.moments
        return self.memory.compression.codec_at(planned, iteration) if moments is None else moments.codec(planned)

    def clip(self, gradients: Sequence[torch.Tensor]) -> None:
        """Scale what this rank adds to the average, all of `gradients` by one factor, where their norm is too large.

        What a rank adds is its gradient over the number of ranks, and not scaled for 16 bits as gradients are here.
        """
        momentum, scale = self.memory.compression.momentum, self._world_size * self.memory.loss_scale
        norms = torch.stack([_norm(each) for each in gradients])
        factor = momentum.shrinks_by(float(torch.linalg.vector_norm(norms)) / scale, self._world_size)
        if factor != 1.0:
            for each in gradients:
                each.mul_(factor)

    def traffic(self) -> Traffic:
        """Return what this rank has sent so far."""
        messages = self._communicator.messages
        queued = 0 if messages is None else messages.sent_nbytes
        return Traffic(self._transport.sent_nbytes + queued, self._dense_nbytes)

    def _average_dense(self, parcel: Parcel, queued: bool) -> None:
        values = self._with_room_for_momentum(parcel.values)
        values.div_(self._world_size)
        absent = self._absent(values, parcel.sizes)
        self._gain_momentum(values, parcel, absent)
        self._pay(values, parcel, absent)
        route = Route(DENSE) if parcel.route.codec else parcel.route
        if queued:
            self._communicator.messages.all_reduce(values)
        else:
            self._communicator.all_reduce(values, strategy=route.strategy, **route.options)
        self._put_back(values, parcel)

    def _with_room_for_momentum(self, values: torch.Tensor) -> torch.Tensor:
        """Return gradients as they are, or where momentum is kept: float32 in host memory."""
        if not self.memory.compression.momentum.factor:
            return values
        return values.to(HOST, torch.float32)

    def _put_back(self, values: torch.Tensor, parcel: Parcel) -> None:
        """Put the average where the gradients were; 16 bits may not hold what float32 did."""
        if values is not parcel.values:
            parcel.values.copy_(values)
        self._look(parcel.values)

    def _pay(self, values: torch.Tensor, parcel: Parcel, absent: Sequence[Bounds]) -> None:
        """Add what another codec left of these gradients: where no residual is kept, all of it is sent now.

        Not of absent ones, whose result torch throws away.
        """
        for name, bounds in zip(parcel.names, pairwise(accumulate(parcel.sizes, initial=0)), strict=True):
            start, stop = bounds
            if bounds not in absent and (owed := self.memory.residuals.take(name, stop - start)) is not None:
                values[start:stop] += torch.as_tensor(owed, device=values.device)

    def _look(self, total: torch.Tensor) -> None:
        """Note a sum that makes a gradient scaler skip this step; it is the same on all ranks."""
        if self.memory.skips and not torch.isfinite(total).all():
            self.memory.spoilt = True

    def _float32(self, parcel: Parcel) -> torch.Tensor:
        """Return memory for a bucket in float32 that stays where it is, as what is queued there must."""
        values = parcel.values
        if values.dtype is torch.float32:
            return values
        if parcel.names not in self._wide:
            self._wide = {key: old for key, old in self._wide.items() if not set(key) & set(parcel.names)}
            self._wide[parcel.names] = torch.empty(values.numel(), device=values.device)
        return self._wide[parcel.names]

    def _average_compressed(self, parcel: Parcel, codec: Codec, queued: bool) -> None:
        """Send what a codec makes of the gradients, as float32: errors of 16-bit ones are kept in full.

        Those on a GPU stay there with their residuals where the codec works there; others go through host memory.
        """
        stays = parcel.values.is_cuda and codec.on_device(parcel.values.device) is not None
        device = parcel.values.device if stays else HOST
        if queued and parcel.values.dtype is not torch.float32:
            values = self._float32(parcel).copy_(parcel.values)
        else:
            values = parcel.values.to(device, torch.float32)  # the same memory where they already are
        if values is parcel.values and device == HOST:
            self._move_once(values)
        scale = 1 / self._world_size
        if self.memory.compression.momentum.factor:
            values.mul_(scale)
            scale = 1.0
        absent = self._absent(values, parcel.sizes)
        velocity = self._gain_momentum(values, parcel, absent)
        beside = self._beside(parcel.sizes, values.device) if queued else None
        packed = None if beside is None else beside.take_out(values, scale)
        small = [] if queued else self._take_out_small(values, parcel.sizes, scale)
        residual = None
        if codec.takes_feedback and self._communicator.encodes(parcel.route.strategy):  # else it goes to who does
            residual = self.memory.residuals.deferred(parcel.names, parcel.sizes, device)
        elif self.memory.residuals.owes(parcel.names):
            values.mul_(scale)
            scale = 1.0
            self._pay(values, parcel, absent)
        aside = [] if residual is None else _set_aside(residual, absent)
        on_gpu = residual is not None and values.is_cuda  # nothing is put off there
        self._communicator.all_reduce(
            values,
            strategy=parcel.route.strategy,
            codec=codec,
            residual=residual.memory if residual is not None and on_gpu else residual,
            parts=self._parts(parcel.sizes),
            scale=scale,
            by_host=not queued,
            **parcel.route.options,
        )
        if velocity is not None and residual is not None:
            self.memory.compression.momentum.after(velocity, self._sent(residual.values(), parcel.sizes, absent))
        for start, kept in aside:
            assert residual is not None
            residual.values()[start : start + len(kept)] += kept
        self._average_small(values, small)
        if beside is not None and packed is not None:
            self._communicator.messages.all_reduce(packed)
            beside.add_back(values, packed)
        if codec.saw_nonfinite():
            self._on_nonfinite(values, parcel)
        self._put_back(values, parcel)
        if residual is not None and values.dtype != parcel.values.dtype and self._transport.rank == 0:
            _keep_rounding(residual, values, parcel.values)

    def _move_once(self, bucket: torch.Tensor) -> None:
        """Have a bucket that comes for the first time on huge pages: codecs go over it several times an iteration."""
        place = bucket.data_ptr(), bucket.nbytes
        if place not in self._moved:
            self._moved.add(place)
            move_to_huge_pages(*place)

    def _parts(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the boundaries of what a codec sees by itself."""
        return tuple(accumulate(sizes, initial=0)) if self.memory.compression.select == "tensor" else (0, sum(sizes))

    def _gain_momentum(self, values: torch.Tensor, parcel: Parcel, absent: Sequence[Bounds] = ()) -> Room | None:
        """Replace gradients by what momentum makes of them, where it is not left to the optimizer.

        Those that are absent stay so, and keep their velocity for the next time.
        """
        momentum = self.memory.compression.momentum
        if not momentum.factor:
            return None
        velocity = self.memory.velocities.bucket(parcel.names, parcel.sizes, values.device)
        kept = [(start, stop, copied(velocity[start:stop])) for start, stop in absent]
        momentum.before(values if values.is_cuda else values.numpy(), velocity)  # type: ignore[arg-type]  # alike
        for start, stop, before in kept:
            values[start:stop], velocity[start:stop] = 0.0, before
        return velocity

    def _sent(self, residual: Room, sizes: Sequence[int], absent: Sequence[Bounds]) -> Room:
        """Return where values left for good; what travels dense or not at all keeps its velocity."""
        sent = sent_from(residual)
        for start, stop in (*self._small(sizes), *absent):
            sent[start:stop] = False
        return sent

    def _small(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        bounds = pairwise(accumulate(sizes, initial=0))
        return [(start, stop) for start, stop in bounds if 0 < stop - start < self.memory.compression.dense_below]

    def _beside(self, sizes: Sequence[int], device: torch.device) -> SmallTensors | None:
        """Return the tensors of a queued bucket that travel dense beside it; None where there are none."""
        key = (tuple(sizes), device)
        if key not in self._small_there:
            bounds = self._small(sizes)
            self._small_there[key] = SmallTensors(bounds, device) if bounds else None
        return self._small_there[key]

    def _take_out_small(
        self, values: torch.Tensor, sizes: Sequence[int], scale: float
    ) -> list[tuple[int, torch.Tensor]]:
        """Take out tensors that travel dense and leave zeros, which cost a codec next to nothing."""
        found = []
        for start, stop in self._small(sizes):
            found.append((start, values[start:stop] * scale))
            values[start:stop] = 0.0
        return found

    def _average_small(self, values: torch.Tensor, small: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Sum the small tensors of a bucket in one dense message, and put them back."""
        if small:
            packed = torch.cat([part for _, part in small])
            self._communicator.all_reduce(packed, strategy=DENSE)
            for (start, part), total in zip(small, torch.split(packed, [len(p) for _, p in small]), strict=True):
                values[start : start + len(part)] += total  # to what a codec sent of an older debt

    def _absent(self, values: torch.Tensor, sizes: Sequence[int]) -> list[Bounds]:
        """Return which tensors have no gradient; one that is all zeros counts as none: it only waits."""
        if not self._leaves_out:
            return []
        return [each for each in pairwise(accumulate(sizes, initial=0)) if not values[slice(*each)].any()]

    def _on_nonfinite(self, values: torch.Tensor, parcel: Parcel) -> None:
        self.memory.spoilt = True
        if not self.memory.skips:
            self.memory.fail()
            parts = zip(parcel.names, torch.split(values, list(parcel.sizes)), strict=True)
            named = ", ".join(repr(name) for name, part in parts if not torch.isfinite(part).all())
            whose = named or f"{parcel.name}, in the iteration before,"  # heard of late, from a device
            raise NonFiniteError(
                f"the gradient of {whose} holds NaN or infinity on some rank, or what {parcel.route.codec} cannot hold;"
                ' fix the loss, or pass on_nonfinite="skip" if a gradient scaler skips such steps'
            )

    def _codec(self, spec: str) -> Codec:
        codec = self._codecs.pop(spec, None)
        if codec is None:
            later = not self.memory.skips  # which must know before the step is taken
            codec = make_codec(spec, self._transport.rank, on_nonfinite=NOTE, defers_nonfinite_check=later)
            codec.begin(self.memory.iterations)
        self._codecs[spec] = codec  # those used last are last
        if len(self._codecs) > KEPT_CODECS:
            del self._codecs[next(iter(self._codecs))]
        return codec


def _norm(values: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm, in float32 or in what is wider."""
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm.float()


def _keep_rounding(residual: PutOff, average: torch.Tensor, applied: torch.Tensor) -> None:
    """Keep what 16 bits do not hold of an average; all ranks apply the same, so one of them keeps it.

    What is put off is taken off this memory later: that may be in any order.
    """
    rounding = torch.nan_to_num(average - applied.to(average.device, average.dtype), 0.0, 0.0, 0.0)
    memory: Room = residual.memory
    memory += rounding if isinstance(memory, torch.Tensor) else rounding.numpy()


def _set_aside(residual: PutOff, absent: Sequence[Bounds]) -> list[tuple[int, Room]]:
    """Take out of the residual what absent tensors owe, so that it is not sent now; return where each belongs."""
    found = []
    for start, stop in absent:
        kept = residual.values()[start:stop]
        found.append((start, copied(kept)))
        kept[:] = 0.0
    return found
