"""The layers of a module as flat buffers: what is sent, and where it comes from and goes to."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Parameters that one submodule owns, with one buffer that holds all their elements."""

    name: str
    parameters: tuple[torch.nn.Parameter, ...]
    flat: torch.Tensor  # as many elements as all parameters together

    def pack_gradients(self, divide_by: int) -> None:
        """Fill the buffer with the gradients, divided; a parameter without one counts as zero."""
        for parameter, part in zip(self.parameters, self._parts(), strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                torch.div(parameter.grad, divide_by, out=part)

    def unpack_gradients(self) -> None:
        """Write the buffer into the gradients."""
        for parameter, part in zip(self.parameters, self._parts(), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part)

    def pack_weights(self) -> None:
        """Fill the buffer with the weights."""
        for parameter, part in zip(self.parameters, self._parts(), strict=True):
            part.copy_(parameter.detach())

    def unpack_weights(self) -> None:
        """Write the buffer into the weights."""
        with torch.no_grad():
            for parameter, part in zip(self.parameters, self._parts(), strict=True):
                parameter.copy_(part)

    def _parts(self) -> Sequence[torch.Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = torch.split(self.flat, sizes)
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]


def one_layer(module: torch.nn.Module) -> Layer:
    """Return the whole module as one layer."""
    return _layer("all", [parameter for parameter in module.parameters() if parameter.requires_grad])


def layers_of(module: torch.nn.Module) -> tuple[Layer, ...]:
    """Return the submodules that own trained parameters, in registration order; a shared one belongs to the first."""
    seen: set[int] = set()
    found = []
    for name, submodule in module.named_modules():
        own = [p for p in submodule.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(id(parameter) for parameter in own)
        if own:
            found.append(_layer(name or "module", own))
    return tuple(found)


def _layer(name: str, parameters: list[torch.nn.Parameter]) -> Layer:
    if not parameters:
        raise PlanError("the module has no parameters that require gradients; wanted at least one")
    kinds = {(parameter.dtype, parameter.device.type) for parameter in parameters}
    if len(kinds) > 1 or next(iter(kinds))[1] != "cpu":
        raise PlanError(f"layer {name!r} has parameters of {sorted(map(str, kinds))}; wanted one type, on the CPU")
    numel = sum(parameter.numel() for parameter in parameters)
    return Layer(name, tuple(parameters), torch.empty(numel, dtype=parameters[0].dtype))
