"""What each rank of a test of queued programs does: the same buckets by gloo through the host, and queued."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported; host memory is the device

import torch
import torch.distributed as dist

from penstock.codecs.registry import make_codec
from penstock.runtime.device.coded import prepare_coded
from penstock.runtime.device.messages import GroupedMessages
from penstock.runtime.device.mirror import Mirror
from penstock.runtime.device.queued import prepare_queued
from penstock.runtime.executor import WINDOW
from penstock.runtime.transport.c10d import C10dTransport
from penstock.strategies import Options, build_compressed
from triton_interpreter import hasten

hasten()
DEVICE = torch.device("cpu")
PARTS = [0, 300, 300, 4800, 4903]
NUMEL = PARTS[-1]
_FACTORS = (1, 3, 1, 2, 4, 1)  # fourths that buckets have: what one writes must not be what another still reads
HOST, QUEUED = "by the host", "queued"  # how a bucket is averaged
_PIECES = 6  # of a tensor that is large enough: more than one for each of two to five chunks


def every_route(rank, cases, routes=(HOST, QUEUED), steps=2):
    """Return, for each (spec, strategy), the bytes of results and residual by each route."""
    return [[_run(rank, spec, strategy, steps, route) for route in routes] for spec, strategy in cases]


def prepared(rank, strategy, parts, codec, messages, form=None):
    """Return a bucket that is ready to be queued."""
    options = Options(block_numel=parts[-1], ranks_per_node=2, partitions=_PIECES)
    program, batches = build_compressed(strategy, dist.get_world_size(), parts, options)
    return prepare_queued(program, rank, codec, form or codec.on_device(DEVICE), batches, messages)


class CountedMessages(GroupedMessages):
    """Messages that count how often some were started together."""

    groups = 0

    def _start(self, calls):
        self.groups += 1
        return super()._start(calls)


def several_buckets(rank, spec, strategy, together, count=4, orders=None):
    """Average buckets, each on its own or with its later rounds among those of the next; return their bytes, when each
    one was through, and how many groups of messages were started. `orders`: of the buckets, in each step."""
    codec, messages = make_codec(spec, rank, defers_nonfinite_check=True), CountedMessages(dist.group.WORLD)
    sizes = [[part * factor // 4 for part in PARTS] for factor in _FACTORS[:count]]
    ready = [prepared(rank, strategy, parts, codec, messages) for parts in sizes]
    buckets, residuals = ([torch.zeros(parts[-1]) for parts in sizes] for _ in range(2))
    through = []
    for step, order in enumerate(orders or [range(count)] * 2):
        for number in order:
            data, residual = buckets[number], residuals[number]
            data.copy_(gradients(rank, 10 * step + number, len(data)))
            ready[number].run(data, step, 60.0, residual=residual, scale=0.25)
            messages.behind(lambda number=number: through.append(number))
            if not together:
                messages.land()
        messages.land()
    return [each.numpy().tobytes() for each in (*buckets, *residuals)], through, messages.groups, messages.sent_nbytes


def gradients(rank, step, numel=NUMEL):
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def _run(rank, spec, strategy, steps, route):
    codec, transport = make_codec(spec, rank, defers_nonfinite_check=True), C10dTransport()
    if route == HOST:  # there messages are cut into blocks; it must make no difference
        options = Options(block_numel=1200, ranks_per_node=2, partitions=_PIECES)
        program, batches = build_compressed(strategy, dist.get_world_size(), PARTS, options)
        ready = prepare_coded(program, transport, codec, codec.on_device(DEVICE), WINDOW, Mirror(DEVICE), batches)
    else:
        ready = prepared(rank, strategy, PARTS, codec, GroupedMessages(dist.group.WORLD))
    data, residual, results = torch.zeros(NUMEL), torch.zeros(NUMEL), []
    for step in range(steps):
        data.copy_(gradients(rank, step))
        ready.run(data, step, 60.0, residual=residual, scale=0.25)
        if route != HOST:
            ready.messages.land()
        assert not ready.was_sent_nan(data)  # the communicator asks after every call
        results.append(data.numpy().tobytes())
    return [*results, residual.numpy().tobytes()]


def spoil_one_rank(rank, spec, strategy):
    """Put infinity into the last rank's first bucket; return in which call the host heard of it, and which are NaN."""
    heard, call = [], 0
    codec = make_codec(spec, rank, defers_nonfinite_check=True)
    form = codec.on_device(DEVICE, lambda: heard.append(call))
    ready = prepared(rank, strategy, PARTS, codec, GroupedMessages(dist.group.WORLD), form)
    data, spoilt = torch.zeros(NUMEL), []
    for call in (1, 2):
        data.copy_(gradients(rank, call))
        if call == 1 and rank == dist.get_world_size() - 1:
            data[1000] = float("inf")
        ready.run(data, call)
        ready.messages.land()
        spoilt.append([bool(data[1000].isnan()), bool(data[:300].isfinite().all()), bool(data[4800:].isfinite().all())])
    return heard, spoilt
