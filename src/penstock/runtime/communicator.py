"""Collectives on tensors: builds, checks, prepares and keeps a program for every kind of call.

    communicator = Communicator(C10dTransport())
    communicator.all_reduce(gradient)                                     # by ring
    communicator.broadcast(weights, root=2, strategy="linear_pipeline", block_numel=65536)

Works in place on numpy arrays and torch tensors; those on a CUDA device go through pinned host memory, or stay there
with a codec that has kernels for the device. A tensor that is not contiguous is copied, and the result is copied back.
One call at a time, from any one thread; `lane` gives another thread a communicator of its own, on the same engine.

What is called again and again, as for the buckets of a model, is resolved once:

    call = communicator.prepare_all_reduce("ring", codec, parts)
    call.run(gradient, residual, scale=1 / world_size)                    # in every iteration
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from penstock.codecs.codec import Codec
from penstock.errors import PenstockError, StrategyError, TransportError
from penstock.network import Network
from penstock.program import Collective, Program
from penstock.runtime.executor import TIMEOUT_SECONDS, WINDOW, Prepared, prepare
from penstock.runtime.failure_diagnosis import Note, asking_seconds, describe, explained
from penstock.runtime.handshake import Claim, agree
from penstock.runtime.hosts import Nodes, this_host
from penstock.runtime.nodes import find_nodes
from penstock.runtime.recorder import Recorder
from penstock.runtime.request import OwnProgram, Request, compressed_request, is_crowded, with_block
from penstock.runtime.transport import Lanes, Transport
from penstock.runtime.views import Flat, Scratch, contiguous_copy, copy_back, flat, is_contiguous, is_on_cuda
from penstock.strategies import Options, parse_strategy
from penstock.strategies.hierarchical import NAME as HIERARCHICAL
from penstock.strategies.hierarchical import leaders

KEPT_PROGRAMS = 256
UNUSED_CALLS = 1024  # after so many others a queued program gives its memory on the device back
Ask = Callable[[Flat, bool], Request | OwnProgram]  # of the data, and whether the program is queued on a device


@dataclass(slots=True)
class _Common:
    """What the lanes of a rank share."""

    network: Network | None
    computing: Lock = field(default_factory=Lock)  # held by the lane that computes
    explaining: Lock = field(default_factory=Lock)
    explained: TransportError | None = None  # the first failure; those of other lanes follow from it
    failure: str | None = None  # why none of them is of any more use
    targets: list[Any] = field(default_factory=list)  # memory that messages may still be under way into
    recorder: Recorder | None = None


class Communicator:
    """The ranks of one engine, ready for collectives.

    All ranks make the same calls in the same order. The first call of a kind compares the ranks' programs; after
    a `TransportError` the communicator is of no more use and says so.
    """

    def __init__(
        self,
        transport: Transport,
        timeout_seconds: float = TIMEOUT_SECONDS,  # how long one message may keep a rank waiting
        network: Network | None = None,  # measured; gives pipelines the block size that is best on it
        host: Callable[[], str] = this_host,  # what ranks of one host have in common
        messages: Any = None,  # between devices (`cuda.messages`): compressed programs are queued there, where they can
    ) -> None:
        self.transport, self.timeout_seconds = transport, timeout_seconds
        self._host, self.messages = host, messages
        self._common = _Common(network)
        self._nodes: Nodes | None = None  # the ranks of each host, once they were asked for
        self._shared_cores: int | None = None  # of the host all ranks are on; 0 where they are on several
        self._start_empty()

    def _start_empty(self) -> None:
        """Keep nothing yet of what belongs to one lane."""
        self._scratch = Scratch()
        self._prepared: OrderedDict[Any, Prepared] = OrderedDict()
        self._agreed: set[str] = set()  # fingerprints of programs that ranks have compared: the same on all of them
        self._queued_at: dict[Any, int] = {}  # call in which a program was queued last
        self._staging: Any = None  # pinned memory, made when the first tensor on a device comes
        self._mirrors: dict[Any, Any] = {}  # scratch on each device where a codec works
        self._calls = 0

    def lane(self, number: int) -> "Communicator | None":
        """Return a communicator of the same ranks for another thread; None where the engine has no such lane.

        Calls of different lanes may run at the same time, and need an order in each lane only. They compute one at a
        time, and fail together. Values on a device, and the engine's own collectives, are lane 0's alone: this one's.
        """
        transport = self.transport.lane(number) if isinstance(self.transport, Lanes) else None
        if transport is None:
            return None
        found = copy(self)
        found.transport, found.messages = transport, None
        found._start_empty()
        return found

    def lanes(self, count: int) -> list["Communicator"]:
        """Return as many lanes as the engine has, `count` at most, this one first."""
        others = [self.lane(number) for number in range(1, count)]
        return [self, *(each for each in others if each is not None)]

    @property
    def network(self) -> Network | None:
        """What was measured, the same on all ranks: pipelines have the block size that is best on it, in all lanes."""
        return self._common.network

    @network.setter
    def network(self, network: Network | None) -> None:
        self._common.network = network

    @property
    def is_crowded(self) -> bool:
        """Whether all ranks share one host's few cores, as a first call found: blocks then depend on no network."""
        return is_crowded(self._shared_cores or 0, self.transport.world_size)

    @property
    def computing(self) -> Lock:
        """Held by whichever lane computes, never by one that waits for messages."""
        return self._common.computing

    @property
    def recorder(self) -> Recorder | None:
        """Notes when each instruction of later calls of all lanes starts and ends, where one is set."""
        return self._common.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._common.recorder = recorder

    def _fail(self, error: BaseException, target: Any = None) -> None:
        """Note that this communicator and its other lanes are of no more use."""
        self._common.failure = self._common.failure or str(error) or type(error).__name__
        self._common.targets.append(target)

    @property
    def timeout_seconds(self) -> float:
        """How long a rank waits for one message and for what the others say of it."""
        return self._timeout_seconds

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None:
        self._timeout_seconds = seconds
        self._patience_seconds = seconds - asking_seconds(seconds)  # of one message

    def all_reduce(
        self,
        data: Any,
        strategy: str = "ring",
        codec: Codec | None = None,
        residual: Any = None,
        parts: Sequence[int] | None = None,
        scale: float = 1.0,
        by_host: bool = False,
        **options: Any,
    ) -> None:
        """Replace `data` on every rank by the sum over all ranks.

        With a `codec` everything travels encoded. `residual`, flat, float32 and aligned with `data`, is added to what
        this rank encodes and keeps what was not sent. `parts` are the element boundaries of the tensors in `data`,
        from 0 to its end: each is encoded by itself, in `partitions` pieces where that option is given. `data`, then of
        float32, is multiplied by `scale` first, which costs less here than before: it is read anyway. Options may also
        be written behind the strategy's name: `hierarchical(ranks_per_node=4)`; without a number, the ranks of a host
        are a node. With `by_host` nothing is queued on a device: the host sends, and waits.
        """
        if codec is None and (residual is not None or scale != 1.0):
            what = "a scale" if residual is None else "a residual"
            raise StrategyError(f"{what} without a codec; pass the codec whose error it is to keep")
        self.prepare_all_reduce(strategy, codec, parts, by_host, **options).run(data, residual, scale)

    def prepare_all_reduce(
        self,
        strategy: str = "ring",
        codec: Codec | None = None,
        parts: Sequence[int] | None = None,
        by_host: bool = False,
        halves: bool = False,
        **options: Any,
    ) -> "Call":
        """Return an all-reduce to be run many times, with everything resolved that does not depend on the data.

        Arguments are those of `all_reduce`; with `halves` it is for `Call.steps`, on values in host memory. No message
        is sent here, except that the first `hierarchical` call without a number of ranks asks all ranks where they are:
        all of them make it together.
        """
        strategy, named = parse_strategy(strategy)
        options = self._with_nodes(strategy, named | options)
        if codec is None:
            return self._call(Collective.ALL_REDUCE, strategy, options, halves)
        return self._compressed(strategy, codec, None if parts is None else tuple(parts), by_host, options, halves)

    def broadcast(self, data: Any, root: int = 0, strategy: str = "linear_pipeline", **options: Any) -> None:
        """Replace `data` on every rank by the root's."""
        self._call(Collective.BROADCAST, strategy, {"root": root, **options}).run(data)

    def reduce(self, data: Any, root: int = 0, strategy: str = "linear_pipeline", **options: Any) -> None:
        """Replace `data` on the root by the sum over all ranks; elsewhere it may hold anything afterwards."""
        self._call(Collective.REDUCE, strategy, {"root": root, **options}).run(data)

    def reduce_scatter(self, data: Any, strategy: str = "ring", **options: Any) -> None:
        """Replace chunk r of `data` on rank r by the sum over all ranks; the rest may hold anything afterwards."""
        self._call(Collective.REDUCE_SCATTER, strategy, options).run(data)

    def all_gather(self, data: Any, strategy: str = "ring", **options: Any) -> None:
        """Replace chunk r of `data`, for each r, by rank r's."""
        self._call(Collective.ALL_GATHER, strategy, options).run(data)

    def run(self, program: Program, data: Any, codec: Codec | None = None, residual: Any = None) -> None:
        """Carry out any program on `data`; programs are told apart by identity, so keep the one you pass."""
        Call(self, (id(program), id(codec)), lambda to, _queued: OwnProgram(program, to.dtype), codec).run(
            data, residual
        )

    def nodes(self) -> Nodes:
        """Return the ranks of each host; the first time, all ranks must ask, or use `hierarchical`, together."""
        if self._nodes is None:
            self._refuse_after_failure()
            try:
                self._nodes = find_nodes(self.transport, self._host(), self.timeout_seconds, self._calls + 1)
            except TransportError as error:
                self._fail(error)
                raise
        return self._nodes

    def queues(self, codec: Codec, device: Any) -> bool:
        """Say whether compressed all-reduces of float32 on a device are queued there, without a wait of the host.

        The codec must have kernels for that, and be content to hear of values that are not finite one call later.
        """
        return self._may_queue(codec, codec.on_device(device))

    def _may_queue(self, codec: Codec, form: Any) -> bool:
        if self.messages is None or form is None:
            return False
        return bool(form.queues) and codec.capabilities.defers_nonfinite_check

    def encodes(self, strategy: str) -> bool:
        """Say whether this rank encodes anything in a compressed all-reduce: in two levels, a leader does."""
        name, options = parse_strategy(strategy)
        return self._encodes(name, self._with_nodes(name, options))

    def _encodes(self, strategy: str, options: dict[str, Any]) -> bool:
        if strategy.replace("-", "_") != HIERARCHICAL:
            return True
        return self.transport.rank in leaders(self.transport.world_size, Options(**options))

    def _with_nodes(self, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a strategy in two levels with the nodes that were found, where none are given."""
        if strategy.replace("-", "_") != HIERARCHICAL or "nodes" in options or "ranks_per_node" in options:
            return options
        return {**options, "nodes": self.nodes()}

    def _refuse_after_failure(self) -> None:
        if self._common.failure is not None:
            raise PenstockError(f"this communicator failed before ({self._common.failure}); make a new one")

    def _call(self, collective: Collective, strategy: str, options: dict[str, Any], halves: bool = False) -> "Call":
        def ask(target: Flat, _queued: bool) -> Request:
            world_size, cores = self.transport.world_size, self._shared_cores or 0
            chosen = with_block(options, collective, strategy, target, world_size, self.network, cores)
            return Request(collective, strategy, world_size, target.numel, target.dtype, Options(**chosen))

        return Call(self, (collective, strategy, *sorted(options.items())), ask, in_halves=halves)

    def _compressed(
        self,
        strategy: str,
        codec: Codec,
        bounds: tuple[int, ...] | None,
        by_host: bool,
        options: dict[str, Any],
        halves: bool,
    ) -> "Call":
        def ask(target: Flat, queued: bool) -> Request:
            ends = (0, target.numel) if bounds is None else bounds
            if ends[-1:] != (target.numel,):
                raise StrategyError(f"parts end at {ends[-1:]}; wanted {target.numel}, the elements of the tensor")
            world_size = self.transport.world_size
            return compressed_request(strategy, codec, world_size, ends, options, target.dtype, queued)

        key = (strategy, bounds, id(codec), *sorted(options.items()))  # the scale may differ between ranks
        return Call(self, key, ask, codec, by_host, self._encodes(strategy, options), halves)

    def forget_programs(self) -> None:
        """Let all programs go, and the memory that they are bound to; a `Call` keeps its own until it is deleted.

        All ranks do this alike, after the same calls: the next one of each kind compares programs again.
        """
        self._prepared.clear()
        self._agreed.clear()
        self._queued_at.clear()

    def _forget_unused(self) -> None:
        """Let queued programs go that were not used for long, as those of torch's first buckets: on all ranks alike."""
        for key in [key for key, call in self._queued_at.items() if call < self._calls - UNUSED_CALLS]:
            del self._queued_at[key]
            self._prepared.pop(key, None)

    def _explained(self, error: TransportError, prepared: Prepared) -> TransportError:
        return self.explain(error, describe(self._calls, prepared.part, prepared.dtype, prepared.digest))

    def explain(self, error: TransportError, where: Note) -> TransportError:
        """Return the error of a rank that is at `where` with what the other ranks say: with which of them it began.

        Where a connection is lost all lanes fail: the first of them asks, and the others fail because of it.
        """
        common = self._common
        with common.explaining:
            if common.explained is None:
                common.explained = explained(error, self.transport, where, self.timeout_seconds)
            return common.explained

    def _agree(self, prepared: Prepared, codec: Codec | None) -> int:
        """Compare programs; where a rank stays away, find out with whom it began."""
        try:
            return agree(self.transport, _claim(prepared, codec, self._host()), self._patience_seconds)
        except TransportError as error:
            mine = describe(self._calls + 1, prepared.part, prepared.dtype)
            raise explained(error, self.transport, mine, self.timeout_seconds) from error.__cause__

    def _stage(self, target: Any) -> Any:
        """Return the place in host memory for a tensor on a CUDA device; None for one that is in host memory."""
        if not is_on_cuda(target):
            return None
        from penstock.runtime.device.staging import Staging  # torch is there, since the tensor is

        self._staging = self._staging or Staging()
        return self._staging.stage(target)

    def _form_there(self, data: Any, codec: Codec, residual: Any) -> Any:
        """Return the codec's form on the device where data and residual are; None where it works on the host."""
        there = residual is None or is_on_cuda(residual)
        return codec.on_device(data.device) if there and data.element_size() == 4 else None

    def _mirror(self, device: Any) -> Any:
        """Return memory on both sides, for what the host sends of a device."""
        if device not in self._mirrors:
            from penstock.runtime.device.mirror import Mirror

            self._mirrors[device] = Mirror(device)
        return self._mirrors[device]

    def _prepare(
        self, key: Any, ask: Ask, target: Flat, codec: Codec | None, form: Any = None, halves: bool = False
    ) -> Prepared:
        """Return the program for this kind of call, cut in `halves` or not; the first time, after ranks have agreed.

        Ranks may differ in which programs they keep: one whose codec works on a device has one for all buckets of a
        size, a host has one for each. Whether ranks compare must not depend on that.

        `form` is the codec's on the device that the data are on, with memory on both sides for what the host sends,
        None where nothing is: the program is queued there.
        """
        queued = form is not None and form[1] is None
        key = (key, target.numel, target.dtype, "here" if form is None else "queued" if queued else "there", halves)
        if queued:
            self._queued_at[key] = self._calls
        if key in self._prepared:
            self._prepared.move_to_end(key)
            return self._prepared[key]
        try:
            prepared = self._prepared_now(ask(target, queued), codec, form, halves)
        except PenstockError as error:
            with contextlib.suppress(PenstockError):  # the others learn why we do not come
                agree(self.transport, Claim(error=str(error)), self.timeout_seconds)
            raise
        if prepared.digest not in self._agreed:
            cores = self._agree(prepared, codec)
            self._agreed.add(prepared.digest)
            if self._shared_cores is None:  # the first agreement says where all ranks are
                self._shared_cores = cores
                if cores:
                    return self._prepare(key[0], ask, target, codec, form, halves)  # perhaps with other blocks
        self._prepared[key] = prepared
        if len(self._prepared) > KEPT_PROGRAMS:
            self._prepared.popitem(last=False)
        return prepared

    def _prepared_now(self, request: Request | OwnProgram, codec: Codec | None, form: Any, halves: bool) -> Prepared:
        """Build this rank's part and resolve all of it that does not depend on the tensor."""
        transport, dtype = self.transport, request.dtype
        if form is not None and form[1] is None:
            from penstock.runtime.device.queued import prepare_queued

            program, batches = request.program()
            assert codec is not None
            assert batches is not None
            queued: Prepared = prepare_queued(  # type: ignore[assignment]  # used as if it were one
                program, transport.rank, codec, form[0], batches, self.messages
            )
            return queued
        part, batches = request.part(transport.rank)
        digest = request.digest(codec) + (" in halves" if halves else "")
        if form is not None:
            from penstock.runtime.device.coded import prepare_coded

            assert codec is not None
            assert batches is not None
            return prepare_coded(part, transport, codec, form[0], WINDOW, form[1], batches, digest)
        scratch = Scratch() if halves and codec is not None else self._scratch  # encoded sums stay in between
        return prepare(part, transport, dtype, codec, WINDOW, scratch, batches, digest, self.computing, halves)


class Call:
    """A collective of one kind, with everything resolved that does not depend on the data.

    A `run` on data of the size, element type and device of the last one does nothing but the work. All ranks run the
    same calls in the same order; the first run of a kind compares their programs. A call keeps its program, and a
    queued one its memory on the device, until it is deleted.
    """

    def __init__(
        self,
        communicator: Communicator,
        key: Any,
        ask: Ask,
        codec: Codec | None = None,
        by_host: bool = False,
        encodes: bool = True,
        in_halves: bool = False,
    ) -> None:
        self.codec, self._in_halves = codec, in_halves
        self.encodes = encodes  # whether this rank encodes anything: only then a residual is of use
        self._communicator, self._key, self._ask, self._by_host = communicator, key, ask, by_host
        self._place: Any = ()  # device and element type of the data, and where the residual is; None: in host memory
        self._form: Any = None  # of the codec on that device, and memory on both sides
        self._queued = self._only_receives = False  # the latter: dense, what another rank decoded
        self._prepared: Prepared | None = None

    def run(self, data: Any, residual: Any = None, scale: float = 1.0, lands: bool = True) -> None:
        """Run the collective on `data`, in place; `residual` and `scale` are those of `all_reduce`.

        Without `lands`, the later rounds of what is queued on a device come with the next bucket (`Messages.land`).
        """
        for _ in self.steps(data, residual, scale, lands):
            pass

    def steps(
        self, data: Any, residual: Any = None, scale: float = 1.0, lands: bool = True, sources: Sequence[Any] = ()
    ) -> Iterator[None]:
        """Run the collective as `run` does; where it was prepared in halves, yield halfway.

        `sources`: arrays in host memory to be read instead of `data`, as `Prepared.run` says.

        Other calls may be made in between; all ranks go on with second halves in the same order.
        """
        owner, codec = self._communicator, self.codec
        common = owner._common
        if common.failure is not None:
            owner._refuse_after_failure()
        target = data if is_contiguous(data) else contiguous_copy(data)
        try:
            if is_on_cuda(target) or self._place is not None:
                self._look(target, residual)
            staged = owner._stage(target) if self._place is not None and self._form is None else None
            host = target if staged is None else staged.host
            place, prepared = flat(host, self._form is not None), self._prepared
            if prepared is None or prepared.numel != place.numel or prepared.dtype != place.dtype or self._queued:
                prepared = owner._prepare(self._key, self._ask, place, codec, self._form, self._in_halves)
                self._prepared = prepared
                self._only_receives = not self._queued and prepared.binder.only_receives
            owner._calls += 1
            if owner._calls % UNUSED_CALLS == 0:
                owner._forget_unused()
            try:
                given, call, patience = host if self._queued else place, owner._calls, owner._patience_seconds
                elsewhere = {"sources": sources} if sources else {}
                going = prepared.run(given, call, patience, common.recorder, staged, residual, scale, **elsewhere)
                if self._in_halves:
                    yield
                    prepared.run_second(going, patience, common.recorder)
                if lands and self._queued:
                    owner.messages.land()
            except TransportError as error:
                raise owner._explained(error, prepared) from error.__cause__
            if codec is not None:
                if self._only_receives and prepared.was_sent_nan(host):
                    codec.note_nonfinite()
                codec.check_finite()  # what it could not raise while others waited for us
        except GeneratorExit:  # it is given up halfway, where no message is under way
            raise
        except BaseException as error:  # also an interrupt: messages may be under way
            if isinstance(error, TransportError) or not isinstance(error, PenstockError):
                owner._fail(error, target)
            raise
        if target is not data:
            copy_back(data, target)

    @property
    def rounds(self) -> int | None:
        """Groups of messages of the last run, where that was queued on a device; None elsewhere."""
        return self._prepared.rounds if self._queued and self._prepared is not None else None  # type: ignore[attr-defined]

    def _look(self, target: Any, residual: Any) -> None:
        """Resolve where the codec works, for data that are on another device than the last."""
        on_device = is_on_cuda(target)
        place = (target.device, target.dtype, residual is None or is_on_cuda(residual)) if on_device else None
        if place == self._place:
            return
        owner, self._place, self._form, self._queued, self._prepared = self._communicator, place, None, False, None
        if on_device and self.codec is not None:
            form = owner._form_there(target, self.codec, residual)
            self._queued = not self._by_host and owner._may_queue(self.codec, form)
            if form is not None and not self._queued and owner.messages is not None:
                # What is queued runs at the same time, on another stream.
                form = self.codec.on_device(target.device, self.codec.note_nonfinite)
            self._form = None if form is None else (form, None if self._queued else owner._mirror(target.device))


def _claim(prepared: Prepared, codec: Codec | None, host: str) -> Claim:
    part = prepared.part
    return Claim(
        collective=part.collective.value,
        strategy=part.strategy,
        world_size=part.world_size,
        numel=prepared.numel,
        dtype=prepared.dtype,
        root=part.root,
        codec=codec.name if codec else "",
        codec_text=codec.fingerprint if codec else "",
        digest=prepared.digest,
        host=host,
    )
