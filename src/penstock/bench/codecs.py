"""How long codecs take beside the same algorithms in torch, and beside copying the gradient.

Implementations take turns, so that a busy moment hits all of them; a figure is the median of many turns, its spread the
distance between the quartiles over the median. On the CPU everything runs on one core. On a GPU times are between
device events around one call, and `graph_seconds` is the same call replayed from a CUDA graph: what the device needs
where the host does not hold it up. `moved_nbytes` are the bytes an operation cannot avoid moving, `floor_seconds` their
time at the bandwidth of a copy (`codec_floor.py`). A peer that cannot run has a row that says why.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from penstock.bench.codec_calls import SELECT, SPECS, Call, make_calls
from penstock.bench.codec_floor import floor_seconds, moved_nbytes
from penstock.bench.codec_peers import PEERS, Inputs
from penstock.codecs.dense.codec import Codec
from penstock.codecs.registry import make_codec

OPERATIONS = ("encode", "encode_feedback", "decode", "decode_add")
IMPLEMENTATIONS = ("penstock", "eager", "compiled")
NBYTES = {"cpu": 64 << 20, "cuda": 256 << 20}


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run."""

    device: str
    nbytes: int
    rounds: int
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    cases: tuple[tuple[str, str], ...] = (*PEERS, SELECT)


def every_case() -> tuple[tuple[str, str], ...]:
    """Return every operation of every codec: those with peers first, and the selection."""
    others = ((name, operation) for name in SPECS for operation in OPERATIONS)
    return (*PEERS, SELECT, *(case for case in others if case not in PEERS))


def codec_rows(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a row for each codec, operation and implementation."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gradient = _allocate(settings).normal_()
    inputs = Inputs(gradient, _allocate(settings), _allocate(settings))
    for codec, operation in settings.cases:
        inputs.residual.zero_()
        inputs.total.zero_()
        calls, failed = make_calls(settings.implementations, codec, operation, inputs)
        yield from _rows(settings, codec, operation, calls, inputs)
        for name, error in failed.items():
            yield _case(settings, codec, operation, name) | {"error": error}


def _allocate(settings: Settings) -> torch.Tensor:
    """Return zeros; on the CPU in numpy's memory, whose large pages make a copy as quick as it can be."""
    numel = settings.nbytes // 4
    if settings.device == "cpu":
        return torch.from_numpy(np.zeros(numel, np.float32))
    return torch.zeros(numel, device=settings.device)


def _rows(
    settings: Settings, codec: str, operation: str, calls: Mapping[str, Call], inputs: Inputs
) -> Iterator[dict[str, Any]]:
    moved = _moved(settings, codec, operation)
    target = _allocate(settings)
    timed = {**calls, "copy": _copy(inputs.gradient, target)}
    seconds = (_time_on_device if settings.device == "cuda" else _time_on_host)(timed, settings.rounds)
    for name in calls:
        low, middle, high = np.percentile(seconds[name], (25, 50, 75))
        copy_seconds = float(np.median(seconds["copy"]))
        row = _case(settings, codec, operation, name) | {
            "seconds": float(middle),
            "copy_seconds": copy_seconds,
            "spread": float((high - low) / middle),
            "moved_nbytes": moved,
            "floor_seconds": floor_seconds(moved, settings.nbytes, copy_seconds),
        }
        if settings.device == "cuda" and name == "penstock":
            row["graph_seconds"] = _graph_seconds(calls[name], settings.rounds)
        yield row


def _case(settings: Settings, codec: str, operation: str, name: str) -> dict[str, Any]:
    return {
        "device": settings.device,
        "codec": codec,
        "operation": operation,
        "implementation": name,
        "nbytes": settings.nbytes,
    }


def _moved(settings: Settings, codec: str, operation: str) -> int:
    made = make_codec(SPECS["topk" if codec == "select" else codec])
    payload = made.max_nbytes(settings.nbytes // 4)
    if any(field.counts for field in made.program.layout.fields) and made.program.name not in ("topk", "dgc"):
        payload = _sent_nbytes(made, settings.nbytes // 4)
    return moved_nbytes(made.program, operation, settings.nbytes, payload)


def _sent_nbytes(codec: Codec, numel: int) -> int:
    """Return the bytes that a codec whose payload depends on the data sends of noise."""
    noise = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    return codec.encode(noise, None, np.empty(codec.max_nbytes(noise.size), np.uint8)) * numel // noise.size


def _copy(source: torch.Tensor, target: torch.Tensor) -> Call:
    if source.is_cuda:
        return lambda: target.copy_(source)
    a, b = target.numpy(), source.numpy()
    return lambda: np.copyto(a, b)


def _time_on_host(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            if name != "copy" and len(seconds[name]) >= 3 and sum(seconds[name]) > 3:
                continue  # slow peers get fewer turns
            start = perf_counter()
            call()
            if number:  # the first turn warms caches up
                seconds[name].append(perf_counter() - start)
    return seconds


def _time_on_device(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    for call in calls.values():
        for _ in range(3):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(4_000_000)  # type: ignore[no-untyped-call] # the device waits, so that the host is ahead
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds[name].append(begin.elapsed_time(end) / 1e3)
    return seconds


def _graph_seconds(call: Call, rounds: int) -> float:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    return float(np.median(_time_on_device({"graph": graph.replay}, rounds)["graph"]))
