"""Builds the record of a run that is over."""

from collections import Counter
from typing import Any

import torch.distributed as dist

from penstock.machine import describe_machine, versions
from penstock.network import Network
from penstock.plan import Plan
from penstock.run_record import CodecCost, CodecLine, RunRecord
from penstock.timeline import Span, Timeline
from penstock.torch.clocks import device_name
from penstock.torch.collective_errors import together
from penstock.train.loop import Loop

_PACKAGES = ("penstock", "numpy", "numba", "torch", "mpi4py", "openmpi")


def make_record(loop: Loop) -> RunRecord:
    """Return the record; all ranks call this, since the measured timeline is that of all ranks."""
    job, plan = loop.job, loop.wrapped.plan
    trace, network = loop.wrapped.found
    sent, dense = loop.meter.per_iteration(loop.step - loop.first)
    split = loop.history.split(loop.computing_seconds)
    whole = split.iteration_seconds
    return RunRecord(
        name=job.name or job.method,
        task=loop.task.name,
        metric_name=loop.task.metric_name,
        workers=loop.shard.world_size,
        engine=job.engine,
        device=device_name(loop.device),
        where=job.where,
        codec=job.codec_spec,
        planner=None if job.is_stock else job.planner,
        strategy=None if job.is_stock else job.strategy,
        machine=describe_machine(),
        versions=versions(_PACKAGES),
        steps=tuple(loop.history.steps),
        evaluations=tuple(loop.history.evaluations),
        iteration_seconds=split.iteration_seconds,
        compute_seconds=split.compute_seconds,
        hidden_seconds=split.hidden_seconds,
        exposed_seconds=split.exposed_seconds,
        samples_per_second=loop.shard.batch * loop.shard.world_size / whole if whole else None,
        bytes_per_iteration=sent,
        dense_bytes_per_iteration=dense,
        plan=plan,
        trace=trace,
        network=network,
        codec_cost=_codec_cost(network, plan),
        routes_used=loop.wrapped.routes_used(),
        predicted=plan.timeline if plan is not None and plan.timeline.spans else None,
        measured=_all_timelines(loop.wrapped.measured_timeline()),
    )


def _codec_cost(network: Network | None, plan: Plan | None) -> CodecCost | None:
    """Return what the codec of most bytes costs, by the name it has in plans, where the network's curves say so."""
    nbytes = Counter[str]()
    for bucket in plan.buckets if plan is not None else ():
        nbytes[bucket.codec or ""] += bucket.nbytes
    codec = next((codec for codec, _ in nbytes.most_common() if codec), None)
    if network is None or codec is None or codec not in network.codecs:
        return None
    curves = network.codecs[codec]
    encode, decode = curves.encode, curves.decode
    return CodecCost(
        curves.ratio,
        CodecLine(encode.startup_seconds, encode.seconds_per_byte),
        CodecLine(decode.startup_seconds, decode.seconds_per_byte / curves.ratio),  # a record counts compressed bytes
    )


def _all_timelines(own: Timeline | None) -> Timeline | None:
    """Return the last iteration of all ranks in one timeline; clocks start with each rank's forward pass."""
    found: list[Any] = [None] * dist.get_world_size()
    with together("sharing timelines", None):
        dist.all_gather_object(found, own)
    spans: tuple[Span, ...] = tuple(span for each in found if each is not None for span in each.spans)
    return Timeline(spans) if spans else None
