"""Where a model's parameters lie in one flat vector.

A convolution's weights lie as [tap, input, output], as the kernels read them; all others as the model has them. Large
parameters lie first: those that are small enough to travel dense are then one piece at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and shapes of parameters, one after the other."""

    shapes: Mapping[str, torch.Size]  # as they lie in the vector

    @classmethod
    def of(cls, model: nn.Module) -> "Layout":
        """Return the layout of a model's parameters."""
        parameters = sorted(model.named_parameters(), key=lambda both: -both[1].numel())
        return cls({name: _turned(parameter).shape for name, parameter in parameters})

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many elements each parameter has."""
        return tuple(shape.numel() for shape in self.shapes.values())

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each parameter's place in a vector, or in every row of many."""
        pieces = torch.split(flat, list(self.sizes), dim=-1)
        found = zip(self.shapes.items(), pieces, strict=True)
        return {name: piece.view(*flat.shape[:-1], *shape) for (name, shape), piece in found}

    def pack(self, model: nn.Module) -> torch.Tensor:
        """Return a model's parameters as one vector."""
        parameters = dict(model.named_parameters())
        return torch.cat([_turned(parameters[name].detach()).flatten() for name in self.shapes])

    @torch.no_grad()
    def unpack(self, flat: torch.Tensor, model: nn.Module) -> None:
        """Give a model the parameters of a vector."""
        views = self.views(flat)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 4:
                parameter.copy_(views[name].unflatten(0, (3, 3)).permute(3, 2, 0, 1))
            else:
                parameter.copy_(views[name])


def _turned(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.permute(2, 3, 1, 0).flatten(0, 1) if parameter.dim() == 4 else parameter
