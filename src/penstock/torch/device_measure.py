"""Measures the network of a process group as training uses it: in host memory, or on the GPU that gradients lie on.

An engine that moves GPU memory by itself (NCCL) is measured on the device; routes of ours from a GPU and back, codec
and all; an engine of host memory as everywhere (`planning/measure.py`).

Nothing here waits inside what is timed: a round is queued so many times, then the device is waited for once. All ranks
agree on every time (the slowest rank's counts).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from time import perf_counter

import torch
import torch.distributed as dist

from penstock.codecs.graphs import urgent_stream
from penstock.codecs.low_rank import LowRank
from penstock.codecs.registry import make_codec
from penstock.cost.fit import fit_measured
from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.planning.measure import HostGauge, with_line
from penstock.runtime.communicator import Communicator
from penstock.runtime.connect import release
from penstock.runtime.measure_compressed import factored_round
from penstock.runtime.measure_network import CHECK_SECONDS, CHECKED, CHECKS, NATIVE, OFF
from penstock.runtime.timed import SIZES
from penstock.runtime.transport import Transport
from penstock.runtime.transport.c10d import C10dTransport
from penstock.torch.clocks import synchronise
from penstock.torch.collective_errors import GroupRanks
from penstock.torch.engines import MPI, device_messages_within, engine_of, message_seconds, own_transport

HOST_ENGINES = ("gloo", "mpi")  # take host memory; others move only their own device's
_LEAST, _MOST = 3, 50  # timed rounds per size
_TENSORS, _TENSOR_NUMEL = 32, 4096  # of the bucket that shows what one more tensor costs
_SHARE = 0.06  # of the budget, for one size
_SURELY = 1 << 22  # bytes that are measured whatever the budget: below, a busy machine's noise hides the bandwidth
_CHECKED = (1 << 24, *CHECKED)  # bytes of the message that checks a measurement: the largest that is quick
_LARGER = (1 << 26, 1 << 28)  # a GPU's links are fast: smaller messages show their startup only

Round = Callable[[torch.Tensor, torch.Tensor], None]


class GroupGauge(HostGauge):
    """Measures a process group's network."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, engine: str | None = None, most_nbytes: int = 0
    ) -> None:
        """`engine` carries gradients, None: the group; dense messages of more than `most_nbytes` are left out."""
        name = engine or engine_of(group, device)
        super().__init__(GroupRanks(group), name, self._connected, most_nbytes)
        self._group, self._place, self._by_group = group, device, engine is None
        self._shares = self._by_group and engine_of(group, torch.device("cpu")) in HOST_ENGINES
        self._on_device, self.device = name not in HOST_ENGINES, device.type

    def links(self, seconds: float) -> Network:
        """Return a network without lines: alpha, beta and gamma."""
        return measure_device_links(self._group, self._place, seconds) if self._on_device else super().links(seconds)

    def holds(self, network: Network) -> bool:
        """Say whether the links are still what a network says that was measured before."""
        return device_link_holds(self._group, self._place, network) if self._on_device else super().holds(network)

    def with_line(self, network: Network, route: Route, seconds: float) -> Network:
        """Return the network with the line of a route, and with the curves of its codec where they are of use."""
        if self.device != "cuda":
            return super().with_line(network, route, seconds)
        if route != Route(NATIVE):
            line = measure_route(self._group, self.transport, self._place, route, seconds)
        elif self._by_group:
            line = measure_all_reduce(self._group, self._place, seconds)
        else:
            return super().with_line(network, route, seconds)
        return with_line(network, route, line)

    def close(self) -> None:
        """Give back what carried the messages; every rank must call this at the same time."""
        if self._transport is not None:
            release(self._transport)
        super().close()

    def _connected(self) -> Transport:
        return (
            C10dTransport(self._group) if self._shares else own_transport(None if self._by_group else MPI, self._group)
        )


def measure_device_links(group: dist.ProcessGroup, device: torch.device, seconds: float = 2.0) -> Network:
    """Return alpha, beta and gamma of a group whose engine works on `device`; every rank must call this together."""
    workers = dist.get_world_size(group)
    if workers == 1:  # sends and sums nothing
        return Network(1, 0.0, 0.0, 0.0, name="measured")
    gamma = _line(group, device, _merge, seconds / 2, "summation").b_seconds_per_byte
    link = _line(group, device, partial(_link, group), seconds / 2, "point-to-point")
    return Network(workers, link.a_seconds, link.b_seconds_per_byte, gamma, name="measured")


def device_link_holds(group: dist.ProcessGroup, device: torch.device, network: Network) -> bool:
    """Say whether messages between neighbours still take what `network` says; as `runtime.measure.link_holds`."""
    if dist.get_world_size(group) == 1:
        return True
    nbytes = next((size for size in _CHECKED if network.link.seconds(size) <= CHECK_SECONDS), _CHECKED[-1])
    first, second = (torch.zeros(nbytes // 4, device=device) for _ in range(2))
    taken = float("inf")
    for _ in range(CHECKS):
        taken = min(taken, _agreed_seconds(group, partial(_link, group), first, second, 1))
        if 1 / OFF <= taken / network.link.seconds(nbytes) <= OFF:
            return True
    return False


def measure_all_reduce(group: dist.ProcessGroup, device: torch.device, seconds: float) -> LinearCost:
    """Return the line of the engine's own all-reduce on `device`."""
    return _line(group, device, partial(_all_reduce, group), seconds, "all-reduce")


def measure_route(
    group: dist.ProcessGroup, transport: Transport, device: torch.device, route: Route, seconds: float
) -> LinearCost:
    """Return the line of one of our all-reduces of memory on `device`, copies or codec and all; `transport` carries it.

    It runs on a stream of its own, as in training, where kernels are captured. Each further tensor of a compressed
    bucket is counted.
    """
    messages = device_messages_within(group, message_seconds(group)) if route.codec else None
    communicator, stream = Communicator(transport, messages=messages), urgent_stream(device)
    options = {"strategy": route.strategy, **route.options}
    codec = make_codec(route.codec, defers_nonfinite_check=True) if route.codec else None
    there = codec is not None and codec.on_device(device) is not None
    factored = _factored(communicator, route, codec) if isinstance(codec, LowRank) else None
    call = communicator.prepare_all_reduce(route.strategy, None if factored else codec, **route.options)

    def one_round(values: torch.Tensor, residual: torch.Tensor, parts: Sequence[int] | None = None) -> None:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            if codec is None:
                call.run(values)
            elif factored is not None:
                factored(parts)(values, residual)
            elif parts is None:
                call.run(values, residual if there else residual.cpu())
            else:
                kept = residual if there else residual.cpu()
                communicator.all_reduce(values, codec=codec, residual=kept, parts=parts, **options)
        stream.synchronize()

    line = _line(group, device, one_round, seconds, f"all-reduce by {route}")
    if codec is None:
        return line
    whole, many = (
        _tensor_seconds(group, device, partial(one_round, parts=parts))
        for parts in ((0, _TENSORS * _TENSOR_NUMEL), range(0, _TENSORS * _TENSOR_NUMEL + 1, _TENSOR_NUMEL))
    )
    each = max(0.0, (many - whole) / (_TENSORS - 1))
    return replace(line, c_seconds_per_tensor=each, rounds=call.rounds)


def _factored(communicator: Communicator, route: Route, codec: LowRank) -> Callable[[Sequence[int] | None], Round]:
    """Return what makes rounds of low-rank factors, of tensors that end somewhere; queued where training does that."""
    messages, scale = communicator.messages, 1 / communicator.transport.world_size
    queues = messages is not None and route.strategy == NATIVE
    add_up = messages.all_reduce if queues else communicator.prepare_all_reduce(route.strategy).run
    return lru_cache(lambda parts: factored_round(codec, add_up, scale, parts))


def _tensor_seconds(group: dist.ProcessGroup, device: torch.device, one_round: Round) -> float:
    first, second = (torch.zeros(_TENSORS * _TENSOR_NUMEL, device=device) for _ in range(2))
    first.normal_(0.0, 1e-12)
    _agreed_seconds(group, one_round, first, second, 1)  # launched one by one, then captured
    return min(_agreed_seconds(group, one_round, first, second, _LEAST) for _ in range(3))


def _line(group: dist.ProcessGroup, device: torch.device, one_round: Round, seconds: float, what: str) -> LinearCost:
    return fit_measured(partial(_points, group, device, one_round, seconds), f"{what} times on {device}").line


def _points(
    group: dist.ProcessGroup, device: torch.device, one_round: Round, seconds: float
) -> list[tuple[float, float]]:
    points = []
    left = seconds
    for size in (*SIZES, *_LARGER):
        first, second = torch.randn(size // 4, device=device) * 1e-12, torch.zeros(size // 4, device=device)
        pilot = _agreed_seconds(group, one_round, first, second, 1)
        rounds = min(max(int(_SHARE * seconds / pilot), _LEAST), _MOST)
        points.append((float(size), _agreed_seconds(group, one_round, first, second, rounds)))
        left -= rounds * points[-1][1]
        if size >= _SURELY and left < 4 * _LEAST * points[-1][1]:
            break
    return points


def _agreed_seconds(
    group: dist.ProcessGroup, one_round: Round, first: torch.Tensor, second: torch.Tensor, rounds: int
) -> float:
    one_round(first, second)
    _agree(group, first.device, 0.0)
    start = perf_counter()
    for _ in range(rounds):
        one_round(first, second)
    synchronise(first.device)
    return max(_agree(group, first.device, (perf_counter() - start) / rounds), 1e-9)


def _agree(group: dist.ProcessGroup, device: torch.device, seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return float(value.item())


def _merge(first: torch.Tensor, second: torch.Tensor) -> None:
    first.add_(second)


def _link(group: dist.ProcessGroup, first: torch.Tensor, second: torch.Tensor) -> None:
    """Send to the next rank while receiving from the one before, as one batch: NCCL would wait for itself otherwise."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    operations = [
        dist.P2POp(dist.isend, first, group=group, group_peer=(rank + 1) % world_size),
        dist.P2POp(dist.irecv, second, group=group, group_peer=(rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _all_reduce(group: dist.ProcessGroup, first: torch.Tensor, _: torch.Tensor) -> None:
    dist.all_reduce(first, group=group)
