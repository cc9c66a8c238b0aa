"""Ranks that only aggregate: HiPress's parameter servers as processes of their own, on hosts without a GPU.

    dist.init_process_group("gloo")                  # all ranks; the last two are to aggregate
    servers = ParameterServers(2)
    if servers.is_server:
        servers.serve()                              # returns when the others are done
    else:
        model = DDP(model, servers=servers)          # averages are over the ranks that train
        ...
        servers.close()

A server has no model, loss or optimizer: it has an exchange, and makes the calls that rank 0's exchange gets. Rank 0
tells it, one small message each: which buckets there are and by which plan they travel (once), that an iteration
begins, that a bucket is started. Workers push to servers and pull from them through the same lanes as all other
programs, so that one bucket is pushed while another is pulled.

Torch's own collectives (weights and buffers at the start, `join`) are between the ranks that train; their group may be
of NCCL. Messages of ours are gloo's, between all ranks: gradients on a GPU go through host memory.

A server waits for rank 0's next word as long as rank 0 shows that it lives: a thread of rank 0 leaves a sign of life in
the store, however long the others evaluate or sleep. Without one for the timeout of messages, or once any rank has left
a note that it cannot go on, the server leaves its own note and ends.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import count
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.errors import FitError, NonFiniteError, PlanError, TransportError
from penstock.exchange.arrays import Floats
from penstock.exchange.compression import Scheme
from penstock.exchange.exchange import Done, Exchange, Failed, Handle, ResolvedBucket
from penstock.exchange.parameter_state import Memory
from penstock.network import Network
from penstock.plan import Plan, Route
from penstock.planning.agree import pack, text_nbytes, unpack
from penstock.planning.measure import HostGauge
from penstock.runtime.communicator import Communicator
from penstock.runtime.failure_diagnosis import Note, asking_seconds, explained
from penstock.runtime.rehearse import Compiling
from penstock.runtime.transport import Work
from penstock.runtime.transport.c10d import C10dTransport
from penstock.torch.check_inputs import require_group
from penstock.torch.checkpoint import TorchMemory
from penstock.torch.collective_errors import GroupRanks
from penstock.torch.engines import message_seconds, own_group

_WORDS = (
    "open", "shut", "follow", "others", "bucket", "begin", "start", "start_in_lane_0", "finish", "residuals", "load",
    "links", "holds", "line", "stop",
)  # fmt: skip  # what a server is told
_NUMBERED = ("open", "bucket", "start", "start_in_lane_0", "load")  # that need the number which comes with a word
Around = Callable[[int], AbstractContextManager[None]]
_PATIENCE = timedelta(days=30)  # for the next word of a rank 0 that lives
_BEAT = 0.1  # of the timeout, between two signs of life
_LOOK_SECONDS = 0.2  # between looks for a sign of life, and for notes
_TAG, _HEAD_NBYTES = 1, 20
_HERE = "a message of rank 0 to its servers"
_TELLING = "rank 0 tells servers what to do"


class ParameterServers:
    """The last `count` ranks of the default process group as parameter servers; every rank makes it, at the same time.

    One wrapper of each process may use it at a time. `backend` is that of the group of the ranks that train, for
    torch's own collectives; None: gloo.
    """

    def __init__(self, count: int, backend: str | None = None) -> None:
        everyone = require_group(None)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if not isinstance(count, int) or not 0 < count < self.world_size:
            wanted = f"at least 1, and at least one that trains of {self.world_size} ranks"
            raise PlanError(f"{count!r} parameter servers; wanted {wanted}")
        self.count, self._lock, self._ended = count, Lock(), Event()
        self._seconds = message_seconds(everyone)
        control, whole = own_group(everyone), own_group(everyone)
        found = own_group(everyone, [*range(self.world_size - count)], backend or "gloo")
        self._workers: dist.ProcessGroup | None = None if self.is_server else found
        self._control = C10dTransport(control, most_seconds=_PATIENCE.total_seconds())
        self.transport = C10dTransport(whole, beside=[control] if self.is_server else [control, found])
        self._where = Note(-1, _TELLING, group=control.group_name)  # no call of a communicator
        if self.rank == 0:
            Thread(target=self._show_alive, name="penstock-alive", daemon=True).start()

    @property
    def is_server(self) -> bool:
        """Whether this rank only aggregates."""
        return self.rank >= self.world_size - self.count

    @property
    def workers(self) -> dist.ProcessGroup:
        """The ranks that train."""
        if self._workers is None:
            raise PlanError(f"rank {self.rank} is a parameter server, and trains nothing; call serve() there")
        return self._workers

    @property
    def strategy(self) -> str:
        """By which gradients travel, as a plan names it."""
        return f"parameter_server(servers={self.count}, dedicated=true)"

    # On ranks that train

    def ranks(self) -> GroupRanks:
        """Return the ranks that train, which plan for all of them."""
        return _Planning(self.workers, self.world_size)

    def tell(self, word: str, *values: Any, number: int = 0) -> None:
        """Have servers do something; only rank 0 does so."""
        if self.rank != 0:
            return
        head = np.array([_WORDS.index(word), number, bool(values)], np.int64).view(np.uint8)
        parts = [np.frombuffer(part, np.uint8).copy() for part in pack(values)] if values else []
        try:
            with self._lock:
                for peer in range(self.world_size - self.count, self.world_size):
                    for part in (head, *parts):
                        self._move(self._control.isend, part, peer)
        except TransportError as error:  # the others that train wait for servers too: they find the note
            raise explained(error, self.transport, self._where, self._seconds) from error.__cause__

    def gauge(self, most_nbytes: int) -> "ServedGauge":
        """Return what measures the network of workers and servers, in host memory."""
        return ServedGauge(self, most_nbytes)

    def collect_residuals(self, memory: Memory) -> None:
        """Add the residuals of servers to those of rank 0: checkpoints of the ranks that train then have all."""
        if self.rank != 0:
            return
        self.tell("residuals")
        for peer in range(self.world_size - self.count, self.world_size):
            kept = self._received(peer)
            for name, numel in kept:
                values: Floats = np.zeros(numel, np.float32)
                self._receive(values.view(np.uint8), peer)
                memory.residuals.add(name, values)

    def close(self) -> None:
        """Let servers end; the ranks that train call it when they are done."""
        self._ended.set()
        self.tell("stop")

    def _show_alive(self) -> None:
        """Leave signs of life for servers, until this process is done with them or the store is gone."""
        beats = count()
        with suppress(ConnectionError):
            while True:
                self.transport.show_alive(str(next(beats)))
                if self._ended.wait(_BEAT * self._seconds):
                    return

    # On servers

    def serve(self) -> None:
        """Aggregate until the ranks that train are done."""
        if not self.is_server:
            raise PlanError(f"rank {self.rank} trains; only the last {self.count} ranks serve")
        Thread(target=self._watch, name="penstock-watch", daemon=True).start()
        try:
            Server(self.transport, self.count, self._hear, self._reply, self._where, self._seconds).run()
        finally:
            self._ended.set()

    def _watch(self) -> None:
        """Hang up once rank 0 shows no life for the timeout, or any rank has left a note: rank 0 may tell no more."""
        sign, seen = b"", monotonic()
        while (left := seen + self._seconds - monotonic()) > 0 and not self._ended.wait(_LOOK_SECONDS):
            with suppress(ConnectionError):  # the store may have gone with rank 0, whose connection ends then too
                if self.transport.is_given_up():
                    break
                if (found := self.transport.sign_of_life(left)) != sign:
                    sign, seen = found, monotonic()
        if not self._ended.is_set():
            self.transport.hang_up()

    def _hear(self) -> tuple[str, int, tuple[Any, ...]]:
        """Return what rank 0 tells: a word, a number, and values."""
        head = np.zeros(3, np.int64)
        self._move(self._control.irecv, head.view(np.uint8), 0, _PATIENCE.total_seconds())
        word, number, follows = (int(each) for each in head)
        return _WORDS[word], number, self._received(0) if follows else ()

    def _reply(self, kept: Mapping[str, Floats]) -> None:
        """Send residuals to rank 0."""
        for part in pack([(name, values.size) for name, values in kept.items()]):
            self._move(self._control.isend, np.frombuffer(part, np.uint8).copy(), 0)
        for values in kept.values():
            self._move(self._control.isend, values.view(np.uint8), 0)

    def _received(self, peer: int) -> Any:
        head = np.zeros(_HEAD_NBYTES, np.uint8)
        self._receive(head, peer)
        text = np.zeros(text_nbytes(head.tobytes(), _HERE), np.uint8)
        self._receive(text, peer)
        return unpack(head.tobytes(), text.tobytes(), _HERE)

    def _receive(self, view: Any, peer: int) -> None:
        self._move(self._control.irecv, view, peer)

    def _move(self, start: Callable[[Any, int, int], Work], view: Any, peer: int, seconds: float | None = None) -> None:
        try:
            start(view, peer, _TAG).wait(seconds or self._seconds - asking_seconds(self._seconds))
        except (TimeoutError, ConnectionError) as error:
            raise TransportError(self.strategy, self.rank, _TELLING, peer, str(error)) from error


class _Planning(GroupRanks):
    """The ranks that train, as planning sees them: messages are between them and the servers."""

    def __init__(self, group: dist.ProcessGroup, world_size: int) -> None:
        super().__init__(group)
        self.world_size = world_size


class ServedGauge(HostGauge):
    """Measures between workers and servers, which are told to take part."""

    def __init__(self, servers: ParameterServers, most_nbytes: int) -> None:
        engine = f"gloo-{servers.count}-servers"  # its measurements are kept by themselves
        super().__init__(servers.ranks(), engine, lambda: servers.transport, most_nbytes)
        self._servers = servers

    def links(self, seconds: float) -> Network:
        """Return a network without lines: alpha, beta and gamma."""
        self._servers.tell("links", seconds)
        return super().links(seconds)

    def holds(self, network: Network) -> bool:
        """Say whether the links are still what a network says that was measured before."""
        self._servers.tell("holds", network)
        return super().holds(network)

    def with_line(self, network: Network, route: Route, seconds: float) -> Network:
        """Return the network with the line of a route, and with the curves of its codec."""
        self._servers.tell("line", network, route, seconds, self._most_nbytes)
        return super().with_line(network, route, seconds)


class ServedExchange(Exchange):
    """An exchange of a rank that trains; that of rank 0 has servers make the same calls."""

    def __init__(self, servers: ParameterServers, route: Route, memory: TorchMemory, **options: Any) -> None:
        self._servers, self._numbers, self._next = servers, dict[ResolvedBucket, int](), count()
        scheme, iterations = memory.compression, memory.iterations
        servers.tell("open", scheme.codec, scheme.dense_below, memory.skips, route, number=iterations)
        communicator = Communicator(servers.transport, timeout_seconds=message_seconds(servers.workers))
        super().__init__(communicator, route=route, memory=memory, servers=servers.count, **options)

    def follow(self, plan: Plan, network: Network | None = None) -> None:
        """Use the plan's routes from now on."""
        if others := {str(each.route) for each in plan.buckets if each.strategy != self._servers.strategy}:
            raise PlanError(
                f"a plan with buckets by {', '.join(sorted(others))}, and servers; wanted all by "
                f"{self._servers.strategy}, or no plan"
            )
        super().follow(plan, network)
        self._servers.tell("follow", plan, network)

    def send_others_by(self, route: Route) -> None:
        """Send what no plan names by one route from now on."""
        super().send_others_by(route)
        self._numbers = {}
        self._servers.tell("others", route)

    def bucket(self, names: Sequence[str], sizes: Sequence[int], dtype: str = "float32") -> ResolvedBucket:
        """Return a bucket of these parameters, for `start`."""
        found = super().bucket(names, sizes, dtype)
        self._numbers[found] = next(self._next)
        self._servers.tell("bucket", list(names), list(sizes), dtype, number=self._numbers[found])
        return found

    def begin(self) -> None:
        """Begin an iteration."""
        if self.memory.moments is not None:
            raise PlanError("CompressedAdamW with servers, which know nothing of its momentum; leave one of them out")
        super().begin()
        self._servers.tell("begin")

    def start(
        self,
        bucket: ResolvedBucket,
        values: Any,
        done: Done | None = None,
        failed: Failed | None = None,
        around: Around | None = None,
        is_divided: bool = False,
        sources: Sequence[Any] = (),
    ) -> Handle:
        """Start to average a bucket; those on a device are not dealt out to lanes."""
        self._servers.tell("start" if around is None else "start_in_lane_0", number=self._numbers[bucket])
        return super().start(bucket, values, done, failed, around, is_divided, sources)

    def finish(self) -> None:
        """Send what was held back."""
        super().finish()
        self._servers.tell("finish")

    def recover(self) -> None:
        """Forget a gradient that was not finite, and go on from a state that was loaded."""
        super().recover()
        self._servers.tell("load", number=self.memory.iterations)

    def close(self) -> None:
        """End the communication threads once they have sent what was started."""
        super().close()
        self._servers.tell("shut")


class Server:
    """What a server does: the calls that rank 0's exchange gets, with zeros for gradients."""

    def __init__(
        self,
        transport: C10dTransport,
        servers: int,
        hear: Callable[[], tuple[str, int, tuple[Any, ...]]],
        reply: Callable[[Mapping[str, Floats]], None],
        where: Note,  # to leave where no bucket is under way
        seconds: float,  # how long one message may keep it waiting
    ) -> None:
        self._transport, self._servers = transport, servers
        self._hear, self._reply, self._where, self._seconds = hear, reply, where, seconds
        self._exchange: Exchange | None = None
        self._buckets: dict[int, tuple[ResolvedBucket, torch.Tensor]] = {}
        self._under_way: dict[int, Handle] = {}  # the last time that each bucket was started

    def run(self) -> None:
        """Carry out what rank 0 sends, until it sends `stop`."""
        try:
            while self._obey():
                pass
        except (ConnectionError, TimeoutError) as error:  # while it measures
            lost = TransportError("torch.distributed", self._transport.rank, "measuring the network", None, str(error))
            raise self._explained(lost) from error
        stopped = replace(self._where, what="rank 0 has let servers end", peer=0)  # for workers that go on
        self._transport.leave_note(json.dumps(asdict(stopped)), gives_up=False)
        self._shut()

    def _obey(self) -> bool:
        """Carry out rank 0's next word; return whether there are more to come."""
        try:
            word, number, values = self._hear()
        except TransportError as error:
            raise self._explained(error) from error.__cause__
        if word in _NUMBERED:
            values = (number, *values)
        with suppress(FitError):  # the same on all ranks; those that train do without that line
            if word != "stop":
                getattr(self, f"_{word}")(*values)
        return word != "stop"

    def _explained(self, error: TransportError) -> Exception:
        """Return why this server ends: what went wrong on a communication thread, which hung up, or else this."""
        if self._exchange is None:
            return explained(error, self._transport, self._where, self._seconds)
        failure = self._exchange.failure
        if failure is not None and not isinstance(failure, NonFiniteError):
            return failure
        return self._exchange.communicator.explain(error, self._where)

    @property
    def exchange(self) -> Exchange:
        """The exchange that aggregates."""
        assert self._exchange is not None, "rank 0 opens it first"
        return self._exchange

    def _open(self, iterations: int, codec: str | None, dense_below: int, skips: bool, route: Route) -> None:
        """Make an exchange; parameters that have no gradient, momentum and clipping are matters of those that train."""
        self._shut()
        memory = TorchMemory(Scheme(codec, dense_below=dense_below), "skip" if skips else "raise")
        memory.iterations = iterations
        communicator = Communicator(self._transport, timeout_seconds=self._seconds)
        self._exchange = Exchange(communicator, route=route, memory=memory, servers=self._servers)

    def _shut(self) -> None:
        self._buckets, self._under_way = {}, {}
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None

    def _follow(self, plan: Plan, network: Network | None) -> None:
        self.exchange.follow(plan, network)

    def _others(self, route: Route) -> None:
        self._settle()
        self._buckets = {}
        self.exchange.send_others_by(route)

    def _bucket(self, number: int, names: list[str], sizes: list[int], dtype: str) -> None:
        memory = torch.zeros(sum(sizes), dtype=getattr(torch, dtype))
        self._buckets[number] = self.exchange.bucket(names, sizes, dtype), memory

    def _begin(self) -> None:
        self.exchange.begin()

    def _start_in_lane_0(self, number: int) -> None:
        self._start(number, lambda _: nullcontext())

    def _start(self, number: int, around: Around | None = None) -> None:
        bucket, memory = self._buckets[number]
        if number in self._under_way:
            self._wait(self._under_way[number])
        memory.zero_()  # its own gradients; what it aggregated the last time lies there
        self._under_way[number] = self.exchange.start(bucket, memory, failed=self._fail, around=around)

    def _fail(self, error: Exception) -> None:
        """Hang up, on a communication thread that cannot go on: the ranks that train wait for what it does not send."""
        if not isinstance(error, NonFiniteError):
            self._transport.hang_up()

    def _finish(self) -> None:
        self.exchange.finish()

    def _settle(self) -> None:
        """Wait for all that was started."""
        for handle in self._under_way.values():
            self._wait(handle)
        self._under_way = {}

    def _wait(self, handle: Handle) -> None:
        try:
            self.exchange.wait(handle)
        except NonFiniteError:
            self.exchange.recover()  # those that train raise it, or skip the step

    def _residuals(self) -> None:
        """Hand the residuals of this server to rank 0."""
        kept = dict[str, Floats]()
        if self._exchange is not None:
            self._settle()
            kept = self.exchange.memory.residuals.values()
            self.exchange.memory.residuals.load({})
        self._reply(kept)

    def _load(self, iterations: int) -> None:
        """Forget the residuals: they are in the state that the others have loaded."""
        self._settle()
        memory = self.exchange.memory
        memory.residuals.load({})
        memory.iterations = iterations
        memory.recover()
        self.exchange.recover()

    # Measuring

    def _links(self, seconds: float) -> None:
        self._gauge().links(seconds)

    def _holds(self, network: Network) -> None:
        self._gauge().holds(network)

    def _line(self, network: Network, route: Route, seconds: float, most_nbytes: int) -> None:
        if route.codec is not None:
            Compiling(()).ready(route)
        self._gauge(most_nbytes).with_line(network, route, seconds)

    def _gauge(self, most_nbytes: int = 0) -> HostGauge:
        return HostGauge(_Whole(self._transport), "gloo", lambda: self._transport, most_nbytes)


class _Whole:
    """All ranks, as a gauge looks at them; servers are not asked anything else while ranks plan."""

    def __init__(self, transport: C10dTransport) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size

    def gather(self, value: Any, what: str) -> list[Any]:
        """Not asked: those that train plan."""
        raise AssertionError(what)

    def from_first(self, value: Any, what: str) -> Any:
        """Not asked: those that train plan."""
        raise AssertionError(what)
