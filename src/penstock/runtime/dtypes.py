"""The element types that can be reduced, by torch's names.

numpy has no bfloat16: its elements travel as their 16 bits, and only the merge kernel knows what they mean.
"""

from typing import Any

import numpy as np

from penstock.errors import StrategyError

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
}
ENCODED_DTYPES = ("float32", "float16", "bfloat16")  # those that a codec takes


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy type whose memory holds elements of `dtype`."""
    if dtype not in DTYPES:
        raise StrategyError(f"element type {dtype!r}; wanted one of {', '.join(DTYPES)}")
    return DTYPES[dtype]
