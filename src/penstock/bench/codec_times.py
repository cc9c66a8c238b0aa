"""How long codecs take beside the same algorithms in torch, and beside copying the gradient.

Implementations take turns, so that a busy moment hits all of them; a figure is the median of many turns, its spread the
distance between the quartiles over the median. On the CPU everything runs on one core. On a GPU times are between
device events around one call, and `graph_seconds` is the same call replayed from a CUDA graph: what the device needs
where the host does not hold it up. `moved_nbytes` are the bytes an operation cannot avoid moving, `floor_seconds` their
time at the bandwidth of a copy. A peer that cannot run has a row that says why.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from penstock.bench.codec_peers import PEERS, TAU, Inputs
from penstock.codecs.codec import Codec
from penstock.codecs.dense.dense_codec import DenseCodec
from penstock.codecs.feedback import Residual
from penstock.codecs.registry import make_codec
from penstock.compll.ir import Program
from penstock.compll.lower.fuse import schedule_decode, schedule_encode
from penstock.compll.lower.passes import Pass, Scatter

Call = Callable[[], Any]
SPECS = {
    "onebit": "onebit",
    "tbq": f"tbq(tau={TAU})",
    "terngrad": "terngrad(bitwidth=2)",
    "topk": "topk(density=0.001)",
    "dgc": "dgc(density=0.001)",
    "signsgd": "signsgd",
    "qsgd": "qsgd(bits=4)",
    "blocks": "blocks(bits=4)",
    "graddrop": "graddrop(density=0.001)",
    "adacomp": "adacomp",
    "3lc": "3lc",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8",
}
SELECT = ("select", "topk")  # the k largest magnitudes alone, without a payload
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
    assert isinstance(made, DenseCodec)
    payload = made.max_nbytes(settings.nbytes // 4)
    if made.capabilities.variable_size and made.program.name not in ("topk", "dgc"):
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


def make_calls(
    implementations: Sequence[str], codec: str, operation: str, inputs: Inputs
) -> tuple[dict[str, Call], dict[str, str]]:
    """Return what can be timed, and why the rest cannot."""
    calls: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for name in implementations:
        if name != "penstock" and (codec, operation) not in (*PEERS, SELECT):
            continue
        try:
            calls[name] = _make(name, codec, operation, inputs)
        except Exception as error:  # a peer that cannot run is a row that says so; our own failure is a failure
            if name == "penstock":
                raise
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return calls, failed


def _make(implementation: str, codec: str, operation: str, inputs: Inputs) -> Call:
    if implementation == "penstock":
        return _select(inputs) if codec == "select" else _penstock(codec, operation, inputs)
    if codec == "select":
        codec, operation = "topk", "encode"
    if implementation == "eager":
        return PEERS[codec, operation](inputs, lambda function: function)
    call = PEERS[codec, operation](inputs, torch.compile)
    call()  # compiles, or says why it cannot
    return call


def _select(inputs: Inputs) -> Call:
    """The k largest magnitudes alone, without a payload."""
    k = inputs.gradient.numel() // 1000
    if not inputs.gradient.is_cuda:
        from penstock.compll.select import largest_magnitudes

        values = inputs.gradient.numpy()
        return lambda: largest_magnitudes(values, k)
    from penstock.compll.backends.triton.select_kernels import select_on_current_stream

    call: Call = select_on_current_stream(inputs.gradient, k)
    return call


def _penstock(name: str, operation: str, inputs: Inputs) -> Call:
    codec = make_codec(SPECS[name])
    gradient, numel = inputs.gradient, inputs.gradient.numel()
    if gradient.is_cuda:
        out = torch.empty(codec.max_nbytes(numel), dtype=torch.uint8, device=gradient.device)
        return _call(codec, operation, gradient, inputs.total, out)
    return _call(codec, operation, gradient.numpy(), inputs.total.numpy(), np.empty(codec.max_nbytes(numel), np.uint8))


def _call(codec: Codec, operation: str, gradient: Any, total: Any, out: Any) -> Call:
    nbytes = codec.encode(gradient, None, out)
    payload = out[:nbytes]
    residual = Residual(total * 0)
    operations: dict[str, Call] = {
        "encode": lambda: codec.encode(gradient, None, out),
        "encode_feedback": lambda: codec.encode(gradient, residual, out),
        "decode": lambda: codec.decode(payload, total),
        "decode_add": lambda: codec.decode_add(payload, total),
    }
    return operations[operation]


def moved_nbytes(program: Program, operation: str, nbytes: int, payload_nbytes: int) -> int:
    """Return the fewest bytes that an operation on a gradient of `nbytes` reads and writes.

    One pass over a gradient reads N bytes. An encode of p passes reads p N and writes its payload; error feedback reads
    the residual and writes it too; a decode writes N, and with adding reads it first. A sparse codec that adds touches
    no more than what was sent.
    """
    passes = int(schedule_encode(program).passes())  # top-k's 1.1 counts its sample, which is no need of the problem
    scatters = any(
        isinstance(output, Scatter)
        for step in schedule_decode(program).steps
        if isinstance(step, Pass)
        for output in step.outputs
    )
    moved = {
        "encode": passes * nbytes + payload_nbytes,
        "encode_feedback": (passes + 2) * nbytes + 2 * payload_nbytes,
        "decode": nbytes + payload_nbytes,
        "decode_add": 2 * payload_nbytes if scatters else 2 * nbytes + payload_nbytes,
        "topk": nbytes,
    }
    return moved[operation]


def floor_seconds(moved_nbytes: int, nbytes: int, copy_seconds: float) -> float:
    """Return the time of moving so many bytes at the bandwidth of a copy of `nbytes`, which moves twice as many.

    >>> floor_seconds(moved_nbytes=3_000, nbytes=1_000, copy_seconds=0.5)
    0.75
    """
    return copy_seconds * moved_nbytes / (2 * nbytes)
