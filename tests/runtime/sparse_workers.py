"""What each rank of a test of sparse blocks does: the same buckets merged on the host, and on the device."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported; host memory is the device

import numpy as np
import torch
import torch.distributed as dist

from penstock.codecs.registry import make_codec
from penstock.compll.backends.triton.starter import Rehearsal, Starter, _variant
from penstock.runtime.device.coded import prepare_coded
from penstock.runtime.device.messages import GroupedMessages
from penstock.runtime.device.mirror import Mirror
from penstock.runtime.device.queued import prepare_queued
from penstock.runtime.executor import WINDOW
from penstock.runtime.transport.c10d import C10dTransport
from penstock.strategies import Options, build_compressed, parse_strategy
from sparse_oracle import dyadic
from triton_interpreter import hasten

hasten()
DEVICE = torch.device("cpu")
PARTS = [0, 300, 300, 301, 303, 3800, 3803, 4903]  # empty, a scalar, and some so small that all of it is sent
STEPS = 3


def both_routes(rank, cases):
    """Return, for each (spec, strategy, kind of gradients), the bytes of results and residual by either route."""
    return [[_run(rank, *case, queued) for queued in (False, True)] for case in cases]


def gradients(rank, kind, world_size):
    """Return each step's gradients of a rank; in the second, what is not finite or becomes so in a sum."""
    found = dyadic(np.random.default_rng(rank), (STEPS, PARTS[-1]), bits=2 if kind == "ties" else 6)
    if kind == "not finite" and rank == world_size - 1:
        found[1, 1000], found[1, 4000] = np.nan, np.inf
    if kind == "overflow":
        found[1, 1000:1003] = 3e38
        found[1, 4000] = 3e38 * (-1) ** rank
    return torch.from_numpy(found)


def _run(rank, spec, strategy, kind, queued):
    codec, world_size = make_codec(spec, rank, defers_nonfinite_check=True), dist.get_world_size()
    form, (name, options) = codec.on_device(DEVICE), parse_strategy(strategy)
    program, batches = build_compressed(name, world_size, PARTS, Options(ranks_per_node=2, **options))
    if queued:
        ready = prepare_queued(program, rank, codec, form, batches, GroupedMessages(dist.group.WORLD))
    else:
        ready = prepare_coded(program, C10dTransport(), codec, form, WINDOW, Mirror(DEVICE), batches)
    data, residual, results = torch.zeros(PARTS[-1]), torch.zeros(PARTS[-1]), []
    for step, values in enumerate(gradients(rank, kind, world_size)):
        data.copy_(values)
        ready.run(data, step, 60.0, residual=residual)
        if queued:
            ready.messages.land()
        results.append(data.numpy().tobytes())
    return [*results, residual.numpy().tobytes()]


def compiled_and_launched(rank, spec, strategy):
    """Return, of queued buckets, each variant of a kernel that was launched before it was asked to be compiled, and how
    many were asked for. Kernels are interpreted here: what would be compiled is noted in the order of all calls."""
    asked, early, started = [], [], Starter.start

    def note(rehearsal):
        asked.extend(each for each in rehearsal._known if each not in asked)

    def start(starter, kernel, programs, arguments, constants, *others):
        if (variant := _variant(kernel, arguments, constants)) not in asked:
            early.append(variant)
        started(starter, kernel, programs, arguments, constants, *others)

    Rehearsal.compile, Starter.start = note, start
    try:
        _run(rank, spec, strategy, "usual", True)
    finally:
        Starter.start = started
    return [kernel.fn.__name__ for kernel, *_ in early], sorted({kernel.fn.__name__ for kernel, *_ in asked})
