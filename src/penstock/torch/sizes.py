"""How a trace, which has one type of gradient, counts the gradients of a model that may have several."""

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from penstock.trace import ITEMSIZE


def gradient_sizes(parameters: Mapping[str, Tensor]) -> tuple[str, dict[str, int]]:
    """Return the type of the gradients and how many elements each has.

    The type is the one that most bytes have. Tensors of another type are counted in elements of that type, rounded
    up, so that their bytes, which is what is sent, are right.
    """
    nbytes = {name: each.numel() * each.element_size() for name, each in parameters.items()}
    by_type: Counter[str] = Counter()
    for name, each in parameters.items():
        by_type[str(each.dtype).removeprefix("torch.")] += nbytes[name]
    dtype = next((found for found, _ in by_type.most_common() if found in ITEMSIZE), "float32")
    return dtype, {name: -(-amount // ITEMSIZE[dtype]) for name, amount in nbytes.items()}
