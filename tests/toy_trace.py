"""A trace as its file has it: equal tensors, for tests that only need some."""

from typing import Any


def toy_trace(tensors: int, numel: int, backward_seconds: float, forward_seconds: float) -> dict[str, Any]:
    """Return so many tensors t0, t1, ... of one size and time."""
    each = {"numel": numel, "backward_seconds": backward_seconds}
    return {
        "format": "penstock-trace/1",
        "model": "toy",
        "device": "paper",
        "batch": 1,
        "dtype": "float32",
        "forward_seconds": forward_seconds,
        "tensors": [{"name": f"t{index}", **each} for index in range(tensors)],
    }
