"""Compressed programs on a device: encode, decode and merge are kernels there, and only encoded bytes come down.

    encode          kernels on the current stream, then a copy of the block to pinned memory
    send            once the host has seen that copy arrive
    recv            into pinned memory
    decode, merge   a copy up, then kernels

Everything runs on the stream that is current where `run` is called: the wrapper gives it one beside the backward pass.
The host waits for the copies it sends, and for nothing else. Program, order and arithmetic are those of the host, so
all ranks end with the same bits. Memory is used again only when the device is through with it: a receive waits for the
copy up that read its place before, and a program for the end of the last one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.codecs.codec import Codec
from penstock.codecs.feedback import DeferredResidual
from penstock.codecs.payload_block import Block, DeviceForm, MergingForm, Task, pinned
from penstock.errors import StrategyError
from penstock.program import Instruction, Op, Part, Program, Slice
from penstock.runtime.binding import Binding
from penstock.runtime.device.mirror import Mark, Mirror, view_at
from penstock.runtime.executor import Prepared, prepare
from penstock.runtime.layout import PAYLOAD_ALIGNMENT, Layout
from penstock.runtime.schedule import Action, Do
from penstock.runtime.transport import Bytes, Transport
from penstock.runtime.views import Flat
from penstock.strategies.batches import Batches, Piece

Guards = dict[int, list[Callable[[], object]]]  # position of an action: what is done before or after it


def prepare_coded(
    program: Part | Program,
    transport: Transport,
    codec: Codec,
    form: DeviceForm,
    window: int,
    mirror: Mirror,
    batches: Batches,
    digest: str = "",
) -> "Coded":
    """Resolve, for this transport's rank, all that does not depend on the bucket, which is float32."""
    base = prepare(program, transport, "float32", codec, window, mirror, batches, digest)
    if any(instruction.op is Op.NATIVE for instruction in base.part.instructions):
        raise StrategyError(f"{program.strategy}: the engine's own collective in a compressed program")
    # Payloads that vary in size are sent at their largest from here; ranks on the host send what they need.
    digest = f"{base.digest} on a device" if codec.capabilities.variable_size else base.digest
    prepared = (base.part, transport, "float32", base.numel, base.actions, mirror, digest, base.binder)
    return Coded(*prepared, form=form, mirror=mirror)


@dataclass(slots=True)
class _OnDevice(Binding):
    """A binding, with what the host does between actions."""

    before: Guards = field(default_factory=lambda: defaultdict(list))
    after: Guards = field(default_factory=lambda: defaultdict(list))


@dataclass(slots=True)
class Coded(Prepared):
    """One rank's part of a compressed program on a device, ready to run any number of times."""

    form: DeviceForm = field(kw_only=True)
    mirror: Mirror = field(kw_only=True)
    _binding: Binding | None = field(default=None, repr=False)  # the last one: most tensors come again

    def _flat(self, data: Any) -> Flat:
        assert data.device == self.mirror.device, f"{data.device} is not {self.mirror.device}"
        return Flat(data.data_ptr(), data.numel(), str(data.dtype).removeprefix("torch."))

    def _holds_nan(self, data: Any, places: list[int]) -> bool:
        return bool(data.view(-1)[places].isnan().any())

    def _walk(self, recorder: Any, staged: Any) -> Iterable[Action]:
        actions, rank = self._guarded(), self.transport.rank
        return actions if recorder is None else recorder.watch(rank, self.part.instructions, actions)

    def _guarded(self) -> Iterator[Action]:
        """Yield the actions, with what the host does between them."""
        binding = self._binding
        assert isinstance(binding, _OnDevice)
        self.mirror.used.wait()
        self.form.begin(self._piece_count)
        for position, action in enumerate(self.actions):
            for guard in binding.before.get(position, ()):
                guard()
            yield action
            for guard in binding.after.get(position, ()):
                guard()
        self.mirror.used.set()

    @property
    def _piece_count(self) -> int:
        batches = self.binder.layout.batches
        assert batches is not None
        return sum(map(len, batches.pieces))

    def _scale(self, target: Flat, scale: float) -> None:
        if scale != 1.0:
            view_at(target.address, target.nbytes, self.mirror.device).view(torch.float32).mul_(scale)

    def _bind(
        self,
        target: Flat,
        kept: Flat | None,
        deferred: DeferredResidual | None,
        scale: float,
        given: Sequence[Any] = (),
    ) -> Binding:
        assert deferred is None, "residuals on a device are tensors"
        assert not given, "what is on a device is read in its bucket"
        mirror = self.mirror
        self._scale(target, scale)
        addresses = (target.address, mirror.host.data_ptr(), kept.address if kept else 0)
        if self._binding is None or self._binding.addresses != addresses:
            mirror.used.wait()  # for what the old binding queued
            bucket = view_at(target.address, target.nbytes, mirror.device)
            residual = view_at(kept.address, kept.nbytes, mirror.device).view(torch.float32) if kept else None
            self._binding = _Builder(self, bucket, residual).build(addresses)
        return self._binding


class _Builder:
    """Makes one rank's instructions into tasks on actual memory."""

    def __init__(self, coded: Coded, bucket: torch.Tensor, residual: torch.Tensor | None) -> None:
        self.form, self.mirror, self.residual, self.actions = coded.form, coded.mirror, residual, coded.actions
        self.instructions = coded.part.instructions
        self.layout, self.encoded = coded.binder.layout, coded.binder.encoded
        self.ordinals = numbered(self.layout)
        self.bucket = bucket
        self.bucket_here = pinned(bucket.numel() if self._sends_dense() else 0, torch.uint8, coded.mirror.device)
        self.before: Guards = defaultdict(list)
        self.after: Guards = defaultdict(list)
        self.tasks: dict[int, Task] = {}

    def build(self, addresses: tuple[int, ...]) -> _OnDevice:
        """Return the binding."""
        count = len(self.instructions)
        computations = [self._computation(index, one) for index, one in enumerate(self.instructions)]
        messages = [self._message(one) for one in self.instructions]
        self._guard()
        nothing: list[None] = [None] * count
        return _OnDevice(
            addresses, messages, computations, [*nothing], [*nothing], before=self.before, after=self.after
        )

    # What each instruction is

    def _computation(self, index: int, one: Instruction) -> Any:
        if one.op in (Op.SEND, Op.RECV):
            return None
        assert one.write is not None
        assert one.read is not None
        if one.op is Op.COPY and self._is_encoded(one.read):
            return np.copyto, (self._here(one.write).numpy(), self._here(one.read).numpy())
        if not self._is_encoded(one.read) and not self._is_encoded(one.write):
            out, other = (self._there(each).view(torch.float32) for each in (one.write, one.read))
            return (out.copy_ if one.op is Op.COPY else out.add_), (other,)
        task = self.tasks[index] = self._task(one, one.write, one.read)
        return task.start, ()

    def _task(self, one: Instruction, write: Slice, read: Slice) -> Task:
        bucket = self.bucket.view(torch.float32)
        if one.op is Op.ENCODE:
            return self.form.encoder(bucket, self.residual, self._block(write))
        if self._is_encoded(write):
            form: MergingForm = self.form  # type: ignore[assignment]  # `Binder` looked whether the codec merges
            return form.merger(self._block(read), self._block(write), self.residual if one.keeps else None)
        arrived = any(other.op in (Op.RECV, Op.COPY) and _overlap(other.write, read) for other in self.instructions)
        return self.form.decoder(self._block(read), bucket, one.op is Op.MERGE, arrived)

    def _message(self, one: Instruction) -> Bytes | None:
        slice_ = {Op.SEND: one.read, Op.RECV: one.write}.get(one.op)
        if slice_ is None:
            return None
        view: Bytes = self._here(slice_).numpy()
        return view

    # What the host does between actions

    def _guard(self) -> None:
        """Go through the actions and put what must be waited for before each."""
        unread: dict[int, Callable[[], None]] = {}  # encodes and copies that the host has not waited for
        for position, (do, index) in enumerate(self.actions):
            one = self.instructions[index]
            if do is not Do.WAIT:
                self._await(position, [i for i in unread if self._collide(i, one)], unread)
            if do is Do.SEND and not self._is_encoded(one.read):
                self.before[position].append(self._fetching(one.read))
            if do is Do.COMPUTE and index in self.tasks:
                unread[index] = self._marking(position, self.tasks[index])
            elif do is Do.WAIT and one.op is Op.RECV and not self._is_encoded(one.write):
                self.after[position].append(self._bringing(one.write))
                unread[index] = self._marking(position, None)

    def _collide(self, index: int, one: Instruction) -> bool:
        """Say whether the host must have seen an earlier copy's end: it came down to where `one` reads or writes here,
        or goes up from where `one` writes."""
        earlier = self.instructions[index]
        if earlier.op is Op.ENCODE:
            return _overlap(earlier.write, one.read) or _overlap(earlier.write, one.write)
        source = earlier.write if earlier.op is Op.RECV else earlier.read
        return one.op in (Op.RECV, Op.COPY) and _overlap(source, one.write)

    def _await(self, position: int, indices: list[int], unread: dict[int, Callable[[], None]]) -> None:
        self.before[position] += [unread.pop(index) for index in indices]

    def _marking(self, position: int, task: Task | None) -> Callable[[], None]:
        """Set a mark after an action; return what waits for it."""
        mark = Mark(self.mirror.device)
        self.after[position].append(mark.set)

        def wait() -> None:
            mark.wait()
            if task is not None:
                task.finish()

        return wait

    def _fetching(self, slice_: Slice | None) -> Callable[[], None]:
        """Return what brings dense elements down and waits for them."""
        here, there, mark = self._here(slice_), self._there(slice_), Mark(self.mirror.device)

        def fetch() -> None:
            here.copy_(there, non_blocking=True)
            mark.set()
            mark.wait()

        return fetch

    def _bringing(self, slice_: Slice | None) -> Callable[[], object]:
        return partial(self._there(slice_).copy_, self._here(slice_), non_blocking=True)

    # Where things are

    def _sends_dense(self) -> bool:
        messages = (one.read if one.op is Op.SEND else one.write for one in self.instructions if one.peer is not None)
        return any(self.layout.place(slice_).in_data for slice_ in messages if slice_ is not None)

    def _block(self, slice_: Slice) -> Block:
        pieces, start, spans = self.layout.pieces(slice_), 0, []
        for piece in pieces:
            nbytes = self.layout.payload_nbytes(piece)
            spans.append((start, start + nbytes))
            start += -(-nbytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
        ordinals = tuple(self.ordinals[piece] for piece in pieces)
        return Block(self._here(slice_), self._there(slice_), tuple(pieces), tuple(spans), ordinals)

    def _here(self, slice_: Slice | None) -> torch.Tensor:
        return self._bytes(slice_, self.bucket_here, self.mirror.host)

    def _there(self, slice_: Slice | None) -> torch.Tensor:
        return self._bytes(slice_, self.bucket, self.mirror.there)

    def _bytes(self, slice_: Slice | None, data: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        assert slice_ is not None
        place = self.layout.place(slice_)
        return (data if place.in_data else scratch)[place.start : place.stop]

    def _is_encoded(self, slice_: Slice | None) -> bool:
        return slice_ is not None and slice_.buffer in self.encoded


def numbered(layout: Layout) -> dict[Piece, int]:
    """Return the number of each piece of a bucket, in the order of their places."""
    assert layout.batches is not None
    return {piece: n for n, piece in enumerate(sorted(piece for batch in layout.batches.pieces for piece in batch))}


def _overlap(one: Slice | None, other: Slice | None) -> bool:
    return one is not None and other is not None and one.overlaps(other)
