"""A codec of the language on a device: kernels make and read payloads there, and the host looks at headers only.

Kernels report a gradient that is not finite in one flag for each piece. Where the host sends the payloads, the flags
are copied down behind them; the host then writes a header that says so over the payload, as the codec does on the CPU,
and every rank decodes NaN. Where payloads never leave the device (`queued_*`), kernels do both, and the host learns of
it later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from penstock.codecs.dense.device_codec import DeviceCodec
from penstock.codecs.graphs import Replays, Work
from penstock.codecs.header import FLAGS_OFFSET, NOT_FINITE
from penstock.codecs.payload_block import Block, Note, Piece, pinned
from penstock.compll.backends.triton.many import Batch, ManyKernels, qualifies

PAYLOAD_ALIGNMENT = 16  # bytes


@dataclass(frozen=True, slots=True)
class WireForm:
    """The codec, its kernels, and whom to tell of values that are not finite."""

    codec: DeviceCodec
    note: Note
    replays: Replays
    many: ManyKernels | None = None  # all pieces in one launch, where the codec's kernels can
    _first_seed: list[int] = field(default_factory=lambda: [0])  # of the bucket at hand

    @property
    def queues(self) -> bool:
        """Whether it is a `QueuedForm`: it needs no host, as payloads have one size."""
        return self.many is not None

    def begin(self, count: int) -> int:
        """Begin with a bucket of `count` pieces: its random numbers do not depend on the order of its messages."""
        if self.many is not None:
            self._first_seed[0] = self.codec.codec.next_seeds(count)
        return self._first_seed[0]

    def encoder(self, bucket: torch.Tensor, residual: torch.Tensor | None, block: Block) -> "_Encoder":
        """Return what encodes the pieces of a block."""
        return _Encoder(self, bucket, residual, block)

    def decoder(self, block: Block, bucket: torch.Tensor, adds: bool, arrived: bool) -> "_Decoder":
        """Return what decodes a block, or adds what it holds."""
        return _Decoder(self, block, bucket, adds, arrived)

    # Without the host

    def max_nbytes(self, numel: int) -> int:
        """Return the bytes of the payload of `numel` elements."""
        return self.codec.codec.max_nbytes(numel)

    def queued_encoder(
        self,
        bucket: torch.Tensor,
        residual: torch.Tensor | None,
        payloads: torch.Tensor,
        pieces: Sequence[Piece],
        places: Sequence[int],
        ordinals: Sequence[int],
    ) -> Callable[[int], None]:
        """Return what queues the encode of all pieces, given what `begin` returned."""
        assert self.many is not None
        batch = self._batch(pieces, [places], ordinals)
        encode, mark = self.many.encoder(batch, bucket, residual, payloads), self.many.marker(batch, payloads)

        def start(seed: int) -> None:
            encode.start(seed)
            mark.start()

        return start

    def queued_decoder(
        self,
        bucket: torch.Tensor,
        payloads: torch.Tensor,
        pieces: Sequence[Piece],
        places: Sequence[Sequence[int]],
        adds: bool,
    ) -> Work:
        """Return what queues the decode of all pieces from each source in turn; NaN for what was not finite."""
        assert self.many is not None
        return self.many.decoder(self._batch(pieces, places), payloads, bucket, adds).start

    def queued_look(self, bucket: torch.Tensor, pieces: Sequence[Piece]) -> "_Look":
        """Return what finds out, behind everything else, whether a piece became NaN."""
        return _Look(self, bucket, pieces)

    def compile(self) -> None:
        """Compile the kernels of all that was made to be queued, before the first of it is."""
        assert self.many is not None
        self.many.compile()

    def _batch(
        self,
        pieces: Sequence[Piece],
        places: Sequence[Sequence[int]],
        ordinals: Sequence[int] = (),
        flags: torch.Tensor | None = None,
    ) -> Batch:
        sizes = [stop - start for start, stop in pieces]
        headers, skipped = ([self.codec.header(size, is_skipped) for size in sizes] for is_skipped in (False, True))
        kernels = self.codec.kernels.kernels
        return Batch(pieces, places, ordinals or range(len(pieces)), headers, skipped, kernels, flags)

    # Kernels that the host waits for

    def replayed(self, work: Work) -> Work:
        """Return what queues encodes again and again; a replay would draw the same random numbers each time."""
        return work if self.codec.kernels.draws else self.replays.make(work)

    def encodes(
        self, bucket: torch.Tensor, residual: torch.Tensor | None, payloads: "Payloads", report: "Report"
    ) -> list[Work]:
        """Return what queues the encode of each piece; the residual is left without what was encoded."""
        if self.many is not None and payloads.pieces:
            batch = self._batch(payloads.pieces, [payloads.places], payloads.ordinals, report.all_flags)
            launches = self.many.encoder(batch, bucket, residual, payloads.memory)
            return [lambda: launches.start(self._first_seed[0])]
        return [
            partial(self._encode, bucket[start:stop], None if residual is None else residual[start:stop], *places)
            for (start, stop), *places in zip(payloads.pieces, payloads.each(), report.flags, strict=True)
        ]

    def _encode(
        self, values: torch.Tensor, residual: torch.Tensor | None, payload: torch.Tensor, flag: torch.Tensor
    ) -> None:
        kernels, codec = self.codec.kernels, self.codec.codec
        body, header = payload[codec.header_nbytes :], self.codec.header(values.numel())
        kernels.encode(values, codec.arguments, codec.next_seed(), residual, body, None, header, flag, settle=True)

    def decodes(self, payloads: "Payloads", bucket: torch.Tensor, adds: bool) -> list[Work]:
        """Return what queues the decode of each piece, or what adds it."""
        if self.many is not None and payloads.pieces:
            batch = self._batch(payloads.pieces, [payloads.places])
            return [self.many.decoder(batch, payloads.memory, bucket, adds).start]
        decode = self._decode_add if adds else self._decode
        return [
            partial(decode, payload, bucket[start:stop])
            for payload, (start, stop) in zip(payloads.each(), payloads.pieces, strict=True)
        ]

    def _decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        kernels, codec, header = self.codec.kernels, self.codec.codec, self.codec.header(values.numel())
        kernels.decode(payload[codec.header_nbytes :], values.numel(), codec.arguments, values, header)

    def _decode_add(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        kernels, codec, header = self.codec.kernels, self.codec.codec, self.codec.header(values.numel())
        kernels.decode_add(payload[codec.header_nbytes :], values, codec.arguments, 1.0, header)

    def look(self, report: "Report") -> list[int]:
        """Return which pieces were not finite; raise what kernels that decode found damaged since the last time."""
        *found, damage = report.here.tolist()
        self.tell(any(found), damage)
        return found

    def tell(self, is_nonfinite: bool, damage: int) -> None:
        """Tell of gradients that are not finite; raise what was damaged."""
        if is_nonfinite:
            self.note()
            self.codec.kernels.status.zero_()  # decoding them was reported too
        elif damage:
            self.codec.kernels.check()


@dataclass(frozen=True, slots=True)
class Payloads:
    """Where the payloads of some pieces lie on the device."""

    memory: torch.Tensor  # uint8
    pieces: tuple[Piece, ...]
    places: tuple[int, ...]  # first byte of each
    ends: tuple[int, ...]
    ordinals: tuple[int, ...] = ()

    def each(self) -> list[torch.Tensor]:
        """Return each payload's own memory."""
        return [self.memory[start:stop] for start, stop in zip(self.places, self.ends, strict=True)]


def _payloads_of(block: Block) -> Payloads:
    starts, stops = (tuple(span[end] for span in block.spans) for end in (0, 1))
    return Payloads(block.device, block.pieces, starts, stops, block.ordinals)


class Report:
    """What kernels report of the pieces of a bucket: a flag each for values that are not finite, and any damage."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._there = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self.here = pinned(count + 1, torch.int32, device)
        self.flags = torch.split(self._there[:-1], 1) if count else ()

    @property
    def all_flags(self) -> torch.Tensor:
        """One for each piece."""
        return self._there[:-1]

    def clear(self) -> None:
        """Queue that no flag is up."""
        self._there.zero_()

    def fetch(self, status: torch.Tensor) -> None:
        """Queue a copy of the flags down, and of what kernels have reported to all."""
        self._there[-1:] = status
        self.here.copy_(self._there, non_blocking=True)


def make_form(codec: DeviceCodec, note: Note) -> WireForm:
    """Return the form of a codec that one stream at a time uses."""
    kernels = codec.kernels
    kernels.in_order = True
    many = ManyKernels(kernels.kernels, codec.codec.arguments, kernels.status) if qualifies(kernels.kernels) else None
    return WireForm(codec, note, Replays(kernels.device), many)


class _Look:
    def __init__(self, form: WireForm, bucket: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self._form = form
        firsts = torch.tensor([start for start, _ in pieces], dtype=torch.int64).to(bucket.device)
        self._found = torch.zeros(2, dtype=torch.int32, device=bucket.device)
        self._here = pinned(2, torch.int32, bucket.device)
        assert form.many is not None
        self._launches = form.many.looker(bucket, firsts, self._found)

    def start(self) -> None:
        """Queue the look and a copy of what it finds."""
        self._launches.start()
        self._here.copy_(self._found, non_blocking=True)

    def finish(self) -> None:
        """Tell of gradients that are not finite; raise what was damaged."""
        self._form.tell(*self._here.tolist())


class _Encoder:
    def __init__(self, form: WireForm, bucket: torch.Tensor, residual: torch.Tensor | None, block: Block) -> None:
        self._form, self._block = form, block
        self._report = Report(len(block.pieces), bucket.device)
        self._jobs = form.encodes(bucket, residual, _payloads_of(block), self._report)
        self.start = form.replayed(self._queue)

    def _queue(self) -> None:
        """Queue the kernels of each piece, and one copy of all payloads."""
        self._report.clear()
        self._form.replays.side_by_side(self._jobs)
        self._block.host.copy_(self._block.device, non_blocking=True)
        self._report.fetch(self._form.codec.kernels.status)

    def finish(self) -> None:
        """Mark the payloads of gradients that are not finite; raise what an earlier decode found damaged."""
        found = self._form.look(self._report)
        for ((start, stop), payload, _), flag in zip(self._block.payloads(), found, strict=True):
            if flag:
                self._form.codec.codec.finish(payload, stop - start, 0, NOT_FINITE)


class _Decoder:
    def __init__(self, form: WireForm, block: Block, bucket: torch.Tensor, adds: bool, arrived: bool) -> None:
        self._form, self._block, self._arrived = form, block, arrived
        self._jobs = form.decodes(_payloads_of(block), bucket, adds)
        self._results = [(here, bucket[start:stop]) for (start, stop), here, _ in block.payloads()]
        self._replay = form.replays.make(self._queue)

    def start(self) -> None:
        """Queue a copy of what arrived, and the kernel of each piece; NaN where its header says so."""
        broken = [values for here, values in self._results if here[FLAGS_OFFSET] & NOT_FINITE]
        if not broken:
            self._replay()
            return
        self._form.note()
        self._queue()  # leaves alone what it cannot read
        self._form.codec.kernels.status.zero_()  # it says that it could not
        for values in broken:
            values.fill_(float("nan"))

    def _queue(self) -> None:
        if self._arrived:
            self._block.device.copy_(self._block.host, non_blocking=True)
        self._form.replays.side_by_side(self._jobs)

    def finish(self) -> None:
        """Nothing."""
