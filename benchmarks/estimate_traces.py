"""Times of a trace estimated from operation counts, for use until they are measured on a GPU.

A kernel takes the longer of its arithmetic at a sustained rate and its memory traffic at a sustained bandwidth
(the roofline model), and each launch adds a fixed time. Forward is the sum over layers. Backward walks the layers
in reverse; the gradients of one layer become ready together, when all of its kernels are done, as they do in
torch's autograd, so the first tensor carries the layer's time and the others 0. The time of layers that learn
nothing goes to the next tensor that becomes ready.

`python benchmarks/estimate_traces.py FOLDER` writes a file for each architecture there; measured ones stay.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from architectures import ARCHITECTURES, Architecture, Layer, Work
from penstock.trace import ITEMSIZE, Tensor, Trace, load_trace, save_trace


@dataclass(frozen=True, slots=True)
class Device:
    """The rates a kernel can count on."""

    name: str
    flops_per_second: float  # peak; a multiply-accumulate is two
    flops_efficiency: float  # sustained share of the peak
    bytes_per_second: float  # peak of the device memory
    bytes_efficiency: float  # sustained share of the peak
    launch_seconds: float  # what the smallest kernel costs

    @property
    def assumptions(self) -> str:
        """The model in one sentence, for a trace's `source`."""
        return (
            f"{self.flops_efficiency:.0%} of {self.flops_per_second / 1e12:g} TFLOP/s or "
            f"{self.bytes_efficiency:.0%} of {self.bytes_per_second / 1e9:g} GB/s, whichever takes longer, "
            f"plus {self.launch_seconds * 1e6:g} us per kernel"
        )


# Peaks from NVIDIA's data sheet (SXM2). The shares are round numbers chosen beforehand, not fitted to any result.
V100 = Device("NVIDIA V100 (roofline model, fp32)", 15.7e12, 0.7, 900e9, 0.8, 5e-6)


def estimate_trace(architecture: Architecture, device: Device = V100, dtype: str = "float32") -> Trace:
    """Return a trace of `architecture` with times estimated for `device`."""
    layers = architecture.layers()
    itemsize = ITEMSIZE[dtype]
    forward = math.fsum(_seconds(layer.forward, architecture.batch, itemsize, device) for layer in layers)
    return Trace(
        model=architecture.model,
        device=device.name,
        batch=architecture.batch,
        dtype=dtype,
        forward_seconds=_to_nanosecond(forward),
        tensors=tuple(_tensors(layers, architecture.batch, itemsize, device)),
        times="estimated",
        source=f"benchmarks/estimate_traces.py: each kernel at {device.assumptions}; a sample is {architecture.sample}",
    )


def _tensors(layers: tuple[Layer, ...], batch: int, itemsize: int, device: Device) -> Iterator[Tensor]:
    """Yield the tensors in the order their gradients become ready."""
    passed = 0.0
    for layer in reversed(layers):
        passed += _seconds(layer.backward, batch, itemsize, device)
        for parameter in layer.parameters:
            yield Tensor(parameter.name, parameter.numel, _to_nanosecond(passed))
            passed = 0.0
    assert passed == 0.0, "an architecture begins with a layer that learns"


def _seconds(works: tuple[Work, ...], batch: int, itemsize: int, device: Device) -> float:
    return math.fsum(kernel_seconds(work, batch, itemsize, device) for work in works)


def kernel_seconds(work: Work, batch: int, itemsize: int, device: Device) -> float:
    """Return how long `work` takes on `device` for a batch, elements being `itemsize` bytes wide."""
    flops = 2 * work.macs * batch
    nbytes = itemsize * (work.activations * batch + work.weights)
    arithmetic = flops / (device.flops_per_second * device.flops_efficiency)
    traffic = nbytes / (device.bytes_per_second * device.bytes_efficiency)
    return max(arithmetic, traffic) + work.launches * device.launch_seconds


def _to_nanosecond(seconds: float) -> float:
    return round(seconds, 9)


def write_estimates(folder: Path) -> tuple[str, ...]:
    """Write one file per architecture into `folder`, except over measured ones; return the names written."""
    written = []
    for name, architecture in ARCHITECTURES.items():
        path = folder / f"{name}.json"
        if path.exists() and load_trace(path).times == "measured":
            continue
        save_trace(estimate_trace(architecture), path)
        written.append(name)
    return tuple(written)


if __name__ == "__main__":
    names = write_estimates(Path(sys.argv[1]))
    print(f"wrote {len(names)} estimated traces: {', '.join(names)}", file=sys.stderr)
