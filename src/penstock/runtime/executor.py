"""Runs one rank's part of a program on real memory, over any engine.

`prepare` does everything that can be done once: the order of actions, the place of every slice, compiled kernels.
`Prepared.run` then walks the list on the calling thread. It starts no thread, allocates nothing after the first
call on a tensor, and makes no decision: what happens next never depends on which message came first, so all ranks
sum in the same order and get the same bits.

Programs of several buckets may run at the same time, each on a thread of its own. They share one lock, `computing`: a
program holds it while it computes and gives it up while it waits for messages, so that computations form one queue.
"""

import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock
from typing import Any, Protocol

import numpy as np

from penstock.codecs.codec import Codec
from penstock.codecs.feedback import DeferredResidual
from penstock.errors import StrategyError, TransportError
from penstock.program import Part, Program
from penstock.program.builder import without_collecting
from penstock.program.composition import in_halves
from penstock.runtime.binding import Binder, Binding, Memories, Sources, copy_sources
from penstock.runtime.layout import lay_out
from penstock.runtime.pieces import Pieces, cut, whole
from penstock.runtime.recorder import Recorder
from penstock.runtime.schedule import Action, Do, choose_window, schedule_in_halves
from penstock.runtime.transport import LAST_TAG, Transport
from penstock.runtime.views import ENCODED_DTYPES, Flat, Scratch, bytes_at, flat, storage_dtype
from penstock.strategies.batches import Batches
from penstock.strategies.pipeline import DEPTH

WINDOW = 4  # messages in flight each way; with 8 or 16, 16 MB on 8 hosts took 1.06-1.22x as long, in one run each
TIMEOUT_SECONDS = 300.0  # how long one message may keep a rank waiting
_BINDINGS = 64  # places of data that are remembered: equal layers of a model share a program
_CALLS = 64  # consecutive calls of a program have so many different tags


def prepare(
    program: Part | Program,
    transport: Transport,
    dtype: str,
    codec: Codec | None = None,
    window: int = WINDOW,
    scratch: Scratch | None = None,
    batches: Batches | None = None,
    digest: str = "",
    computing: "Lock | None" = None,
    halves: bool = False,
) -> "Prepared":
    """Resolve, for this transport's rank, all that does not depend on the tensor.

    A strategy's part is made for `DEPTH` messages in flight, whatever the other ranks do; of a whole program it is
    found out how many it needs. `batches` says what a position stands for where that is not an element, and `digest` is
    a fingerprint of what all ranks have in common; a whole program has its own. `computing` is the lock of programs
    that may run at the same time. With `halves` the part is cut; what is encoded in the first half is sent in the
    second, so `scratch` must then be no other program's.
    """
    if program.world_size != transport.world_size:
        raise StrategyError(
            f"{program.strategy}: program for {program.world_size} ranks on {transport.world_size}; build it for these"
        )
    known = ENCODED_DTYPES if codec is None or codec.capabilities.half_precision else ENCODED_DTYPES[:1]
    if codec is not None and dtype not in known:
        raise StrategyError(f"{program.strategy}: elements of {dtype} with {codec.name}; wanted {' or '.join(known)}")
    if isinstance(program, Program):
        part, window = program.part(transport.rank), choose_window(program, window)
        digest = digest or program_digest(program, dtype, codec, batches)
    else:
        part, window = program, max(window, DEPTH)
    part, halfway = in_halves(part) if halves else (part, len(part.instructions))
    with without_collecting():
        layout = lay_out(part, storage_dtype(dtype).itemsize, codec.max_nbytes if codec else None, batches)
        first, second = schedule_in_halves(part.instructions, halfway, window)
    scratch = scratch or Scratch()
    scratch.reserve(layout.nbytes)
    binder = Binder(part, dtype, layout, codec)
    numel = batches.numel if batches else part.numel
    return Prepared(part, transport, dtype, numel, first, scratch, digest, binder, computing or Lock(), second)


def program_digest(program: Program, dtype: str, codec: Codec | None, batches: Batches | None = None) -> str:
    """Return a fingerprint of a whole program and of all else that ranks must agree on."""
    named = f"{codec.name} {codec.fingerprint}" if codec else None
    text = f"{program}\n{program.buffers}\n{program.root} {dtype} {named} {batches}"
    return hashlib.sha256(text.encode()).hexdigest()


class Stage(Protocol):
    """A tensor that is elsewhere and comes to host memory in pieces (`cuda.staging`)."""

    def walk(self, pieces: Pieces, actions: Sequence[Action]) -> Iterator[Action]:
        """Yield the actions, each when its pieces are here."""


@dataclass(slots=True)
class Prepared:
    """One rank's part of a program, ready to run any number of times."""

    part: Part
    transport: Transport
    dtype: str
    numel: int  # of the data
    actions: tuple[Action, ...]
    scratch: Scratch
    digest: str
    binder: Binder
    computing: Lock = field(default_factory=Lock, repr=False)
    second: tuple[Action, ...] = ()  # of a part that is cut, what comes after `actions`
    _bindings: OrderedDict[tuple[float, ...], Binding] = field(default_factory=OrderedDict, repr=False)  # latest last
    _pieces: Pieces | None = field(default=None, repr=False)  # of the first tensor that came from a device
    _reads: dict[Any, bool] = field(default_factory=dict, repr=False)  # sources where they are, by what that depends on
    _first_tag: int = field(init=False, repr=False)  # of its messages; the number of the call is added

    def __post_init__(self) -> None:
        self._first_tag = zlib.crc32(self.digest.encode()) * _CALLS

    def run(
        self,
        data: Any,
        call: int = 0,
        timeout_seconds: float = TIMEOUT_SECONDS,
        recorder: Recorder | None = None,
        staged: "Stage | None" = None,
        residual: Any = None,
        scale: float = 1.0,
        sources: Sequence[Any] = (),
    ) -> tuple[Binding, int]:
        """Carry the program out on `data`, in place: an array or tensor, or its place in memory.

        Of one that is cut this is the first half: `run_second` takes what is returned. In between none of its messages
        is under way, and other programs may run.

        `residual`, float32 and as large as `data`, is added to what this rank encodes and keeps what was not sent. With
        a `DeferredResidual` the codec defers the subtraction where it can. `data`, of float32, is multiplied by `scale`
        first: piece by piece, when it is read anyway.

        `sources`, where there are any, are flat arrays of what `data` is to hold one after the other: they are read
        where they are, and not changed, if the program can; else they are copied to `data` first.

        `call` numbers the calls of all ranks alike; it is part of the messages' tag, so that ranks that run
        different calls never exchange data. A `recorder` notes when each instruction starts and ends;
        `staged` brings `data` here from a device, and back, while the program runs.
        """
        target = data if isinstance(data, Flat) else self._flat(data)
        if target.numel != self.numel or target.dtype != self.dtype:
            raise StrategyError(
                f"{self.part.strategy}: {target.numel} elements of {target.dtype}; "
                f"prepared for {self.numel} of {self.dtype}"
            )
        if scale != 1.0 and self.dtype != "float32":
            raise StrategyError(f"{self.part.strategy}: a scale for elements of {self.dtype}; wanted float32")
        kept, deferred = None, None
        if residual is not None:
            kept, deferred = self._kept(residual)
        with self.computing:
            binding = self._bind(target, kept, deferred, scale, sources)
        tag = 1 + (self._first_tag + call % _CALLS) % LAST_TAG
        try:
            self._perform(binding, tag, timeout_seconds, self._walk(recorder, staged))
        finally:
            if binding.sources is not None:
                binding.sources.arrays = ()  # a framework waits for their memory
        return binding, tag

    def run_second(
        self, going: tuple[Binding, int], timeout_seconds: float = TIMEOUT_SECONDS, recorder: Recorder | None = None
    ) -> None:
        """Carry out the second half of a program that is cut, of the `run` that returned `going`."""
        self._perform(*going, timeout_seconds, self._watched(self.second, recorder))

    def was_sent_nan(self, data: Any) -> bool:
        """Say whether a rank that decodes nothing itself, since another leads its node, was sent NaN in the last run.

        A payload of values that are not finite is decoded to NaN throughout, so one element of each piece will do.
        """
        batches = self.binder.layout.batches
        if batches is None:
            return False
        starts = [start for pieces in batches.pieces for start, _ in pieces]
        return self._holds_nan(data, starts)

    def _holds_nan(self, data: Any, places: list[int]) -> bool:
        target = self._flat(data)
        found = bytes_at(target.address, target.nbytes).view(storage_dtype(target.dtype))[places]
        is_nan = (found & 0x7FFF) > 0x7F80 if target.dtype == "bfloat16" else np.isnan(found)
        return bool(is_nan.any())

    def _flat(self, data: Any) -> Flat:
        return flat(data)

    def _walk(self, recorder: Recorder | None, staged: "Stage | None") -> Iterable[Action]:
        """Return the actions as they are, or through whatever wants to be asked between them."""
        instructions = self.part.instructions
        actions: Iterable[Action] = self.actions
        if staged is not None:
            batched = self.binder.layout.batches is not None
            self._pieces = self._pieces or (
                whole(self.numel, self.actions) if batched else cut(instructions, self.actions)
            )
            actions = staged.walk(self._pieces, self.actions)
        return actions if recorder is None else self._watched(actions, recorder)

    def _watched(self, actions: Iterable[Action], recorder: Recorder | None) -> Iterable[Action]:
        """Return actions, noted where there is a recorder."""
        if recorder is None:
            return actions
        return recorder.watch(self.transport.rank, self.part.instructions, actions)

    def _perform(self, binding: Binding, tag: int, timeout_seconds: float, actions: Iterable[Action]) -> None:
        """Walk the actions: the one loop that moves data."""
        transport, instructions = self.transport, self.part.instructions
        messages, computations, works = binding.messages, binding.computations, binding.works
        sizes = binding.sizes if getattr(transport, "takes_shorter", False) else None
        computing, index = self.computing, 0
        try:
            for do, index in actions:
                if do is Do.WAIT:
                    works[index].wait(timeout_seconds)  # type: ignore[union-attr]  # the schedule started it
                    works[index] = None
                elif do is Do.SEND:
                    view = messages[index]
                    if sizes is not None and (size := sizes[index]) is not None:
                        view = view[: size[0](*size[1])]  # type: ignore[index]  # the part that is filled
                    works[index] = transport.isend(view, instructions[index].peer, tag)  # type: ignore[arg-type]
                elif do is Do.RECV:
                    works[index] = transport.irecv(messages[index], instructions[index].peer, tag)  # type: ignore[arg-type]
                elif do is Do.COMPUTE:
                    function, operands = computations[index]  # type: ignore[misc]
                    with computing:
                        function(*operands)
                else:
                    self._native(binding, index, timeout_seconds)
        except (TimeoutError, ConnectionError) as cause:
            raise self._failure(index, cause) from cause

    def _native(self, binding: Binding, index: int, timeout_seconds: float) -> None:
        values = binding.natives[index]
        assert values is not None
        self.transport.native(self.part.collective, values, self.dtype, self.part.root, timeout_seconds)

    def _kept(self, residual: Any) -> tuple[Flat, DeferredResidual | None]:
        """Return the memory of a residual, and the residual itself where the codec is to put off what it leaves."""
        deferred = residual if isinstance(residual, DeferredResidual) and self.binder.can.deferred_feedback else None
        memory = residual.values() if isinstance(residual, DeferredResidual) and deferred is None else residual
        kept = self._flat(memory if deferred is None else deferred.memory)
        if kept.numel != self.numel or kept.dtype != "float32":
            found = f"a residual of {kept.numel} elements of {kept.dtype}"
            raise StrategyError(f"{self.part.strategy}: {found}; wanted {self.numel} of float32")
        return kept, deferred

    def _bind(
        self,
        target: Flat,
        kept: Flat | None,
        deferred: DeferredResidual | None,
        scale: float,
        given: Sequence[Any] = (),
    ) -> Binding:
        """Return the instructions on this memory; kept, as most tensors come again and alike ones share a program.

        All data are multiplied here where the program cannot do it as it reads them.
        """
        sources = None
        if given:
            sources = Sources(tuple(accumulate((each.size for each in given), initial=0)), given)
            key = (sources.bounds, scale, deferred is not None)
            if key not in self._reads:
                self._reads[key] = self.binder.reads(sources, Memories(None, None, None, deferred, scale))  # type: ignore[arg-type]
            if not self._reads[key]:
                copy_sources(bytes_at(target.address, target.nbytes).view(storage_dtype(target.dtype)), given)
                sources = None
        if scale != 1.0 and self.binder.scales_ahead:
            values = bytes_at(target.address, target.nbytes).view(np.float32)
            np.multiply(values, np.float32(scale), values)
            scale = 1.0
        scratch = self.scratch
        addresses = (
            target.address, scratch.address, kept.address if kept else 0, scale,
            *(sources.bounds if sources else ()), deferred.generation if deferred else 0,
        )  # fmt: skip
        found = self._bindings.get(addresses)
        if found is not None:
            self._bindings.move_to_end(addresses)
            if found.sources is not None:
                found.sources.arrays = given
            return found
        self._forget(scratch.address)
        if deferred:  # its pieces were another program's, or are at other places now
            deferred.begin()
            addresses = (*addresses[:-1], deferred.generation)
        residual = bytes_at(kept.address, kept.nbytes).view(np.float32) if kept else None
        memories = Memories(bytes_at(target.address, target.nbytes), scratch.memory, residual, deferred, scale, sources)
        found = self._bindings[addresses] = self.binder.bind(addresses, memories)
        return found

    def _forget(self, scratch: int) -> None:
        """Make room for one more binding; those on scratch that has moved would keep its memory."""
        for addresses in [each for each in self._bindings if each[1] != scratch]:
            del self._bindings[addresses]
        while len(self._bindings) >= _BINDINGS:
            self._bindings.popitem(last=False)

    def _failure(self, index: int, cause: Exception) -> TransportError:
        instruction = self.part.instructions[index]
        return TransportError(
            self.part.strategy, self.transport.rank, f"{index}: {instruction}", instruction.peer, str(cause)
        )
