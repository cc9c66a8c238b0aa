"""Small tensors of a bucket on a device, packed beside one another: one dense message carries all of them."""

from collections.abc import Sequence

import torch


class SmallTensors:
    """Tensors of one bucket, each given as (first element, one past the last); a few kernels for all of them."""

    def __init__(self, bounds: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._places = torch.cat([torch.arange(start, stop) for start, stop in bounds]).to(device)

    def take_out(self, bucket: torch.Tensor, scale: float) -> torch.Tensor:
        """Return their values times `scale`, packed; the bucket is left with zeros there."""
        packed = bucket.index_select(0, self._places).mul_(scale)
        bucket.index_fill_(0, self._places, 0.0)
        return packed

    def add_back(self, bucket: torch.Tensor, packed: torch.Tensor) -> None:
        """Add packed values to the bucket."""
        bucket.index_add_(0, self._places, packed)  # no place comes twice: the order of additions changes nothing
