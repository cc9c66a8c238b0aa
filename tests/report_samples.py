"""Synthetic runs for tests of the report: made by a formula, never measured, the same every time."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.cost.ways import way_for
from penstock.network import LinearCost, Network
from penstock.planners import PLANNERS
from penstock.run_record import CodecCost, CodecLine, Evaluation, RouteUse, RunRecord, Step, save_run
from penstock.simulator.iteration import predict
from penstock.timeline import COMMUNICATION, COMPUTATION, COMPUTE, Span, Timeline, in_turn
from penstock.trace import Tensor, Trace

WORKERS = 4
NETWORK = Network(
    workers=WORKERS,
    alpha_seconds=2e-4,
    beta_seconds_per_byte=8.5e-9,
    gamma_seconds_per_byte=2e-10,
    all_reduce={"ring": LinearCost(1.4e-3, 1.35e-8), "native": LinearCost(2.0e-3, 1.3e-8)},
    name="synthetic",
    source="synthetic: made for tests",
)
_SIZES = (65, 8_320, 131_072, 256, 65_536, 256, 262_144, 1_024, 16_384, 64, 98_304, 33_280)


def sample_trace() -> Trace:
    tensors = tuple(
        Tensor(f"blocks.{11 - i}.{'bias' if size < 2_000 else 'weight'}", size, 4e-4 + size * 2e-9)
        for i, size in enumerate(_SIZES)
    )
    return Trace("synthetic-model", "no device: synthetic", 16, "float32", 3e-3, tensors, source="made for tests")


def sample_run(name: str, seconds: float, floor: float, **parts: object) -> RunRecord:
    """Return a run whose loss falls towards `floor`, with iterations of `seconds`."""
    steps = tuple(
        Step(n, n * seconds, floor + 2.5 * math.exp(-n / 60) + 0.08 * math.sin(7.3 * n) ** 2) for n in range(1, 241)
    )
    evaluations = tuple(Evaluation(s.step, s.seconds, s.loss * 1.44) for s in steps[39::40])
    record = RunRecord(
        name=name,
        task="synthetic",
        metric_name="held-out bits per character",
        workers=WORKERS,
        engine="gloo",
        device="no device: synthetic",
        where="emulated hosts, 1gbit",
        machine={"cores": 2, "cpu": "synthetic"},
        versions={"torch": "0.0"},
        steps=steps,
        evaluations=evaluations,
        iteration_seconds=seconds,
        samples_per_second=WORKERS * 16 / seconds,
        trace=sample_trace(),
        network=NETWORK,
    )
    return replace(record, **parts)


def measured_timeline(trace: Trace, seconds: float, names: Sequence[str], codec: bool) -> Timeline:
    """Return an iteration of all ranks, a little different on each: whole buckets, and with a codec instructions."""
    spans, count = [], len(names)
    for rank in range(WORKERS):
        ends = trace.compute_seconds * (1 + 0.02 * rank)
        spans.append(Span("forward", COMPUTE, 0.0, trace.forward_seconds, rank))
        spans.append(Span("backward", COMPUTE, trace.forward_seconds, ends, rank))
        inside = []
        for part, name in enumerate(names):
            start = trace.forward_seconds + (part + 1) * (seconds - trace.forward_seconds) / (1.5 * count)
            length = 2.3e-3 if codec else (seconds - start) / count
            spans.append(Span(name, "network", start, start + length, rank))
            to, sender = (rank + 1) % WORKERS, (rank - 1) % WORKERS
            inside += [
                Span(f"{name}: encode", COMPUTATION, start, start + 3e-4, rank),
                Span(f"{name}: send to {to}", COMMUNICATION, start + 3e-4, start + 1.9e-3, rank),
                Span(f"{name}: recv from {sender}", COMMUNICATION, start, start + 2e-3, rank),
                Span(f"{name}: decode", COMPUTATION, start + 2e-3, start + length, rank),
            ]
        spans += in_turn(inside) if codec else []
    return Timeline(tuple(spans))


def sample_runs() -> list[RunRecord]:
    """Return stock DDP, a plan that wins, and a codec that is fast and learns a little worse."""
    trace = sample_trace()
    compute = trace.compute_seconds
    dense = 2 * (WORKERS - 1) / WORKERS * sum(trace.nbytes)
    plan = predict(trace, PLANNERS["exact"], [way_for(NETWORK, "ring", WORKERS)], WORKERS)
    packed = replace(plan, buckets=tuple(replace(bucket, codec="onebit") for bucket in plan.buckets))
    names = [bucket.name for bucket in plan.buckets]
    common = {"compute_seconds": compute, "dense_bytes_per_iteration": dense}
    stock, exact, onebit = 0.0441, 0.0362, 0.0148
    return [
        sample_run(
            "stock DDP", stock, 0.9, **common, hidden_seconds=3e-3, exposed_seconds=stock - compute,
            bytes_per_iteration=dense, measured=measured_timeline(trace, stock, ["all buckets"], codec=False),
        ),
        sample_run(
            "exact plan", exact, 0.9, **common, hidden_seconds=5e-3, exposed_seconds=exact - compute,
            bytes_per_iteration=dense, planner="exact", strategy="ring", plan=plan, predicted=plan.timeline,
            measured=measured_timeline(trace, exact, names, codec=False),
        ),
        sample_run(
            "onebit", onebit, 0.97, **common, hidden_seconds=2e-3, exposed_seconds=onebit - compute,
            bytes_per_iteration=dense / 31, planner="exact", strategy="ring", codec="onebit", plan=packed,
            codec_cost=CodecCost(1 / 32, CodecLine(4e-5, 3e-10), CodecLine(2e-5, 2e-9)),
            routes_used=(RouteUse("ring+onebit", 3, 4_000_000, 130_000),),
            predicted=plan.timeline, measured=measured_timeline(trace, onebit, names, codec=True),
        ),
    ]  # fmt: skip


def save_sample_runs(folder: Path) -> Path:
    """Write the sample runs as `penstock train` lays them out."""
    for run in sample_runs():
        place = folder / run.name.replace(" ", "-").lower()
        place.mkdir(parents=True)
        save_run(run, place / "run.json")
    return folder
