"""Collectives on tensors: builds, checks, prepares and keeps a program for every kind of call.

    communicator = Communicator(C10dTransport())
    communicator.all_reduce(gradient)                                     # by ring
    communicator.broadcast(weights, root=2, strategy="linear_pipeline", block_numel=65536)

Works in place on numpy arrays and torch tensors; those on a CUDA device go through pinned host memory, or stay there
with NCCL. A tensor that is not contiguous is copied, and the result is copied back. One call at a time, from any one
thread.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import PenstockError, StrategyError, TransportError
from penstock.network import Network
from penstock.program import Collective, Program
from penstock.runtime.codec_protocol import Codec, Reporting, fingerprint_of
from penstock.runtime.executor import TIMEOUT_SECONDS, WINDOW, Prepared, prepare
from penstock.runtime.failure_diagnosis import asking_seconds, describe, explained
from penstock.runtime.handshake import Claim, agree
from penstock.runtime.hosts import Nodes, this_host
from penstock.runtime.nodes import find_nodes
from penstock.runtime.recorder import Recorder
from penstock.runtime.request import OwnProgram, Request, with_block
from penstock.runtime.transport import OnDevice, Transport
from penstock.runtime.views import Flat, Scratch, contiguous_copy, copy_back, flat, is_contiguous, is_on_cuda
from penstock.strategies import Options, parse_strategy
from penstock.strategies.hierarchical import NAME as HIERARCHICAL
from penstock.strategies.hierarchical import leaders
from penstock.strategies.strategy import coded_block

KEPT_PROGRAMS = 256
UNUSED_CALLS = 1024  # after so many others a queued program gives its memory on the device back
Ask = Callable[[Flat], Request | OwnProgram]


class Communicator:
    """The ranks of one engine, ready for collectives.

    All ranks make the same calls in the same order. The first call of a kind compares the ranks' programs; after
    a `TransportError` the communicator is of no more use and says so.
    """

    def __init__(
        self,
        transport: Transport,
        timeout_seconds: float = TIMEOUT_SECONDS,  # how long one message may keep a rank waiting
        window: int = WINDOW,  # messages in flight, each way
        network: Network | None = None,  # measured; gives pipelines the block size that is best on it
        host: Callable[[], str] = this_host,  # what ranks of one host have in common
        messages: Any = None,  # between devices (`cuda.messages`): compressed programs are queued there, where they can
    ) -> None:
        self.transport, self.timeout_seconds, self.window, self.network = transport, timeout_seconds, window, network
        self._host, self.messages = host, messages
        self._nodes: Nodes | None = None  # the ranks of each host, once a call wanted to know
        self._scratch = Scratch()
        self._prepared: OrderedDict[Any, Prepared] = OrderedDict()
        self._queued_at: dict[Any, int] = {}  # call in which a program was queued last
        self._shared_cores: int | None = None  # of the host all ranks are on; 0 where they are on several
        self._staging: Any = None  # pinned memory, made when the first tensor on a device comes
        self._mirrors: dict[Any, Any] = {}  # scratch on each device where a codec works
        self._calls = 0
        self.recorder: Recorder | None = None  # set one to see when each instruction of later calls starts and ends
        self._failure: tuple[str, Any] | None = None  # why, and memory that messages may still be under way into

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
        strategy, named = parse_strategy(strategy)
        options = self._with_nodes(strategy, named | options)
        if codec is None:
            if residual is not None or scale != 1.0:
                what = "a scale" if residual is None else "a residual"
                raise StrategyError(f"{what} without a codec; pass the codec whose error it is to keep")
            self._call(Collective.ALL_REDUCE, strategy, data, options)
        else:
            self._compressed(strategy, data, codec, residual, parts, scale, by_host, options)

    def broadcast(self, data: Any, root: int = 0, strategy: str = "linear_pipeline", **options: Any) -> None:
        """Replace `data` on every rank by the root's."""
        self._call(Collective.BROADCAST, strategy, data, {"root": root, **options})

    def reduce(self, data: Any, root: int = 0, strategy: str = "linear_pipeline", **options: Any) -> None:
        """Replace `data` on the root by the sum over all ranks; elsewhere it may hold anything afterwards."""
        self._call(Collective.REDUCE, strategy, data, {"root": root, **options})

    def reduce_scatter(self, data: Any, strategy: str = "ring", **options: Any) -> None:
        """Replace chunk r of `data` on rank r by the sum over all ranks; the rest may hold anything afterwards."""
        self._call(Collective.REDUCE_SCATTER, strategy, data, options)

    def all_gather(self, data: Any, strategy: str = "ring", **options: Any) -> None:
        """Replace chunk r of `data`, for each r, by rank r's."""
        self._call(Collective.ALL_GATHER, strategy, data, options)

    def run(self, program: Program, data: Any, codec: Codec | None = None, residual: Any = None) -> None:
        """Carry out any program on `data`; programs are told apart by identity, so keep the one you pass."""
        self._run((id(program), id(codec)), lambda target: OwnProgram(program, target.dtype), data, codec, residual)

    def nodes(self) -> Nodes:
        """Return the ranks of each host; the first time, all ranks must ask, or use `hierarchical`, together."""
        if self._nodes is None:
            self._refuse_after_failure()
            try:
                self._nodes = find_nodes(self.transport, self._host(), self.timeout_seconds, self._calls + 1)
            except TransportError as error:
                self._failure = str(error), None
                raise
        return self._nodes

    def queues(self, codec: Codec, device: Any) -> bool:
        """Say whether compressed all-reduces of float32 on a device are queued there, without a wait of the host.

        The codec must have kernels for that, and be content to hear of values that are not finite one call later.
        """
        return hasattr(codec, "on_device") and self._may_queue(codec, codec.on_device(device))

    def _may_queue(self, codec: Codec, form: Any) -> bool:
        if self.messages is None or self.transport.world_size == 1 or not getattr(codec, "hears_later", True):
            return False
        return form is not None and bool(form.queues)

    def encodes(self, strategy: str) -> bool:
        """Say whether this rank encodes anything in a compressed all-reduce: in two levels, a node's first rank."""
        name, options = parse_strategy(strategy)
        if name.replace("-", "_") != HIERARCHICAL:
            return True
        return self.transport.rank in leaders(self.transport.world_size, Options(**self._with_nodes(name, options)))

    def _with_nodes(self, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a strategy in two levels with the nodes that were found, unless given."""
        if strategy.replace("-", "_") != HIERARCHICAL or "nodes" in options or "ranks_per_node" in options:
            return options
        return {**options, "nodes": self.nodes()}

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise PenstockError(f"this communicator failed before ({self._failure[0]}); make a new one")

    def _call(self, collective: Collective, strategy: str, data: Any, options: dict[str, Any]) -> None:
        def ask(target: Flat) -> Request:
            world_size, cores = self.transport.world_size, self._shared_cores or 0
            chosen = with_block(options, collective, strategy, target, world_size, self.network, cores)
            return Request(collective, strategy, world_size, target.numel, target.dtype, Options(**chosen))

        self._run((collective, strategy, *sorted(options.items())), ask, data, None)

    def _compressed(
        self,
        strategy: str,
        data: Any,
        codec: Codec,
        residual: Any,
        parts: Sequence[int] | None,
        scale: float,
        by_host: bool,
        options: dict[str, Any],
    ) -> None:
        bounds = None if parts is None else tuple(parts)
        form = self._form_there(data, codec, residual)
        queues = not by_host and self._may_queue(codec, form)

        def ask(target: Flat) -> Request:
            ends = (0, target.numel) if bounds is None else bounds
            if ends[-1:] != (target.numel,):
                raise StrategyError(f"parts end at {ends[-1:]}; wanted {target.numel}, the elements of the tensor")
            whole = max(target.numel, 1)  # where messages are queued, a round's are one group
            block = whole if queues else coded_block(codec.max_nbytes(1 << 20))
            chosen = Options(**{"block_numel": block, **options})
            world_size = self.transport.world_size
            return Request(Collective.ALL_REDUCE, strategy, world_size, target.numel, target.dtype, chosen, ends)

        key = (strategy, bounds, id(codec), *sorted(options.items()))  # the scale may differ between ranks
        there = None if form is None else (form, None if queues else self._mirror(data.device))
        self._run(key, ask, data, codec, residual, scale, there)

    def _run(
        self,
        key: Any,
        ask: Ask,
        data: Any,
        codec: Codec | None,
        residual: Any = None,
        scale: float = 1.0,
        form: Any = None,  # the codec's on the device that `data` is on: they stay there; and its memory on the host
    ) -> None:
        self._refuse_after_failure()
        target = data if is_contiguous(data) else contiguous_copy(data)
        direct = isinstance(self.transport, OnDevice)
        staged = None if direct or form is not None else self._stage(target)
        try:
            host = target if staged is None else staged.host
            prepared = self._prepare(key, ask, flat(host, direct or form is not None), codec, form)
            self._calls += 1
            if self._calls % UNUSED_CALLS == 0:
                self._forget_unused()
            self._carry_out(prepared, host, staged, residual, scale)
            if isinstance(codec, Reporting):
                if prepared.was_sent_nan(host):
                    codec.note_nonfinite()
                codec.check()  # what it could not raise while others waited for us
        except BaseException as error:  # also an interrupt: messages may be under way
            if isinstance(error, TransportError) or not isinstance(error, PenstockError):
                self._failure = str(error) or type(error).__name__, target
            raise
        if target is not data:
            copy_back(data, target)

    def _forget_unused(self) -> None:
        """Let queued programs go that were not used for long, as those of torch's first buckets: on all ranks alike."""
        for key in [key for key, call in self._queued_at.items() if call < self._calls - UNUSED_CALLS]:
            del self._queued_at[key]
            self._prepared.pop(key, None)

    def _carry_out(self, prepared: Prepared, host: Any, staged: Any, residual: Any, scale: float) -> None:
        """Run a program; where messages do not come, find out with whom it began."""
        try:
            prepared.run(host, self._calls, self._patience_seconds, self.recorder, staged, residual, scale)
        except TransportError as error:
            mine = describe(self._calls, prepared.part, prepared.dtype, prepared.digest)
            raise explained(error, self.transport, mine, self.timeout_seconds) from error.__cause__

    @property
    def _patience_seconds(self) -> float:
        return self.timeout_seconds - asking_seconds(self.timeout_seconds)

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
        there = is_on_cuda(data) and (residual is None or is_on_cuda(residual))
        if not there or data.element_size() != 4 or not hasattr(codec, "on_device"):
            return None
        return None if isinstance(self.transport, OnDevice) else codec.on_device(data.device)

    def _mirror(self, device: Any) -> Any:
        """Return memory on both sides, for what the host sends of a device."""
        if device not in self._mirrors:
            from penstock.runtime.device.mirror import Mirror

            self._mirrors[device] = Mirror(device)
        return self._mirrors[device]

    def _prepare(self, key: Any, ask: Ask, target: Flat, codec: Codec | None, form: Any = None) -> Prepared:
        """Return the program for this kind of call; the first time, after all ranks have agreed on it."""
        where = "here" if form is None else "queued" if form[1] is None else "there"
        key = (key, target.numel, target.dtype, where)
        if where == "queued":
            self._queued_at[key] = self._calls
        if key in self._prepared:
            self._prepared.move_to_end(key)
            return self._prepared[key]
        try:
            prepared = self._prepared_now(ask(target), codec, form)
        except PenstockError as error:
            with contextlib.suppress(PenstockError):  # the others learn why we do not come
                agree(self.transport, Claim(error=str(error)), self.timeout_seconds)
            raise
        cores = self._agree(prepared, codec)
        if self._shared_cores is None:  # the first agreement says where all ranks are
            self._shared_cores = cores
            if cores:
                return self._prepare(key[0], ask, target, codec, form)  # perhaps with other blocks
        self._prepared[key] = prepared
        if len(self._prepared) > KEPT_PROGRAMS:
            self._prepared.popitem(last=False)
        return prepared

    def _prepared_now(self, request: Request | OwnProgram, codec: Codec | None, form: Any) -> Prepared:
        """Build this rank's part and resolve all of it that does not depend on the tensor."""
        transport, dtype = self.transport, request.dtype
        if isinstance(transport, OnDevice):
            on_device: Prepared = transport.prepare_on_device(request.program()[0], dtype)  # used as if it were one
            return on_device
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
        digest = request.digest(codec)
        if form is not None:
            from penstock.runtime.device.coded import prepare_coded

            assert codec is not None
            assert batches is not None
            return prepare_coded(part, transport, codec, form[0], self.window, form[1], batches, digest)
        return prepare(part, transport, dtype, codec, self.window, self._scratch, batches, digest)


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
        codec_text=fingerprint_of(codec),
        digest=prepared.digest,
        host=host,
    )
