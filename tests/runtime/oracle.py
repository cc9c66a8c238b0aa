"""What every collective must leave behind, computed in float64, and how far rounding may be from it."""

import numpy as np

from penstock.program import split
from penstock.runtime.views import DTYPES

UNIT = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # half a last place
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133}  # smallest subnormal: sums may round to it


def random_tensors(world_size: int, numel: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    """Return each rank's input, as its storage; integers small enough not to overflow."""
    rng = np.random.default_rng((seed, world_size, numel))
    if dtype == "bfloat16":
        return [to_bfloat16(rng.normal(0, 3, numel)) for _ in range(world_size)]
    if dtype in UNIT:
        return [rng.normal(0, 3, numel).astype(dtype) for _ in range(world_size)]
    return [rng.integers(0, 100 // world_size + 1, numel).astype(DTYPES[dtype]) for _ in range(world_size)]


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def as_float64(tensor: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (tensor.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return tensor.astype(np.float64)


def assert_is_sum(result: np.ndarray, inputs: list[np.ndarray], dtype: str) -> None:
    """Check against the bound of any order of summation: (n - 1) u sum|x|, to first order."""
    values = [as_float64(tensor, dtype) for tensor in inputs]
    exact = np.sum(values, axis=0)
    size = np.sum(np.abs(values), axis=0)
    count = len(inputs) - 1
    own = UNIT["float64"] if dtype in UNIT else 0.0  # the oracle rounds too
    bound = 1.05 * count * (UNIT.get(dtype, 0.0) + own) * size + count * TINY.get(dtype, 0.0)
    assert np.all(np.abs(as_float64(result, dtype) - exact) <= bound)


def check(operation: str, inputs: list[np.ndarray], outputs: list[np.ndarray], dtype: str, root: int) -> None:
    """Check all ranks' results of one collective."""
    world_size, numel = len(inputs), inputs[0].size
    if operation == "all_reduce":
        assert len({output.tobytes() for output in outputs}) == 1, "ranks hold different bits"
        assert_is_sum(outputs[0], inputs, dtype)
    elif operation == "broadcast":
        assert {output.tobytes() for output in outputs} == {inputs[root].tobytes()}
    elif operation == "reduce":
        assert_is_sum(outputs[root], inputs, dtype)
    elif operation == "reduce_scatter":
        for rank, (start, stop) in enumerate(split(numel, world_size)):
            assert_is_sum(outputs[rank][start:stop], [tensor[start:stop] for tensor in inputs], dtype)
    else:
        assert operation == "all_gather"
        chunks = [inputs[rank][start:stop] for rank, (start, stop) in enumerate(split(numel, world_size))]
        assert {output.tobytes() for output in outputs} == {np.concatenate(chunks).tobytes()}
