"""What a GPU did while a training step ran, from torch's profiler: kernels of the model, and those beside them.

The model's kernels run on one stream, the one that is busy longest; a codec's kernels and copies run on others. What
counts as hidden is the time during which a codec's kernel and one of the model's were both running.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]  # seconds from, to
KINDS = ("encode", "decode")  # generated kernels are called by these; others beside the model's are grouped by name


@dataclass(frozen=True, slots=True)
class Activity:
    """One kernel or copy."""

    name: str
    stream: int
    start_seconds: float
    seconds: float

    @property
    def span(self) -> Span:
        """From when to when."""
        return self.start_seconds, self.start_seconds + self.seconds

    @property
    def is_copy(self) -> bool:
        """Whether it moves memory only."""
        return self.name.startswith(("Memcpy", "Memset"))


def watch(step: Callable[[], object], steps: int) -> list[Activity]:
    """Return what the GPU did in so many steps."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found: Any = profiler.profiler
    return [
        Activity(event.name(), event.device_resource_id(), event.start_ns() * 1e-9, event.duration_ns() * 1e-9)
        for event in found.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0 and not _is_annotation(event.name())
    ]


def _is_annotation(name: str) -> bool:
    """Say whether a span only stands around kernels, as torch's for the forward pass and the optimizer do."""
    return name.startswith(("DistributedDataParallel.", "Optimizer.", "ProfilerStep", "nccl:", "##"))


def summarise(activities: Sequence[Activity], steps: int) -> dict[str, Any]:
    """Return what ran beside the model per step, and how much of it while the model's kernels ran."""
    busy: dict[int, float] = defaultdict(float)
    for one in activities:
        busy[one.stream] += 0.0 if one.is_copy else one.seconds
    main = max(busy, key=lambda stream: busy[stream])
    model = united(one.span for one in activities if one.stream == main)
    beside = [one for one in activities if one.stream != main]
    kernels = [one for one in beside if not one.is_copy]
    total, hidden = sum(one.seconds for one in kernels), sum(shared(one.span, model) for one in kernels)
    return {
        "model_seconds": busy[main] / steps,
        "codec_kernels": len(kernels) // steps,
        "codec_seconds": total / steps,
        "copy_seconds": sum(one.seconds for one in beside if one.is_copy) / steps,
        "hidden": hidden / total if total else None,
        "kinds": _kinds(kernels, model, steps),
    }


def _kinds(kernels: Iterable[Activity], model: Sequence[Span], steps: int) -> dict[str, dict[str, float]]:
    """Return seconds per step and the hidden share of each kind of kernel."""
    found: dict[str, list[Activity]] = defaultdict(list)
    for one in kernels:
        found[kind_of(one.name)].append(one)
    return {
        kind: {
            "seconds": sum(one.seconds for one in some) / steps,
            "hidden": sum(shared(one.span, model) for one in some) / sum(one.seconds for one in some),
        }
        for kind, some in sorted(found.items())
    }


def kind_of(kernel: str) -> str:
    """Return what a kernel beside the model's is for.

    >>> [kind_of(name) for name in ("encode_1", "decode", "mark_exactly", "void at::native::elementwise_kernel<4>")]
    ['encode', 'decode', 'select', 'element-wise']
    """
    if kernel.startswith(KINDS):
        return kernel.split("_")[0]
    return "element-wise" if "at::" in kernel else "select"


def united(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, those that touch as one.

    >>> united([(3, 4), (0, 1), (0.5, 2)])
    [(0, 2), (3, 4)]
    """
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def shared(span: Span, others: Sequence[Span]) -> float:
    """Return how much of a span lies in others, which do not overlap one another.

    >>> shared((1, 4), [(0, 2), (3, 9)])
    2
    """
    return sum(max(0, min(span[1], stop) - max(span[0], start)) for start, stop in others)
