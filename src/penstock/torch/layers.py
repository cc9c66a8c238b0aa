"""The layers of a module as flat buffers: what is sent, and where it comes from and goes to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from penstock.errors import PlanError

Group = tuple[str, list[torch.nn.Parameter]]  # submodules that travel together: their names, and what they own


@dataclass(frozen=True, eq=False)
class Layer:
    """Parameters that one submodule owns, with one buffer that holds all their elements."""

    name: str
    parameters: tuple[torch.nn.Parameter, ...]

    @cached_property
    def flat(self) -> torch.Tensor:
        """The elements of all parameters, then one for each, whose sum says how many ranks had a gradient."""
        numel = sum(parameter.numel() for parameter in self.parameters)
        return torch.empty(numel + len(self.parameters), dtype=self.parameters[0].dtype)

    def pack_gradients(self, divide_by: int) -> None:
        """Fill the buffer with the gradients, divided; a parameter without one counts as zero."""
        for parameter, part, used in zip(self.parameters, self._parts(), self._used(), strict=True):
            used.fill_(parameter.grad is not None)
            if parameter.grad is None:
                part.zero_()
            else:
                torch.div(parameter.grad, divide_by, out=part)

    def lend_gradients(self) -> None:
        """Let the buffer be the gradients, without a copy, until they are forgotten; none where no rank had one."""
        for parameter, part, used in zip(self.parameters, self._parts(), self._used().tolist(), strict=True):
            parameter.grad = part if used else None

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
        parts = torch.split(self.flat[: sum(sizes)], sizes)
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    def _used(self) -> torch.Tensor:
        return self.flat[-len(self.parameters) :]


def one_layer(module: torch.nn.Module) -> Layer:
    """Return the whole module as one layer."""
    return _layer("all", [parameter for parameter in module.parameters() if parameter.requires_grad])


def layers_of(module: torch.nn.Module, least_nbytes: int = 0) -> tuple[Layer, ...]:
    """Return the submodules that own trained parameters, in registration order; a shared one belongs to the first.

    Neighbours are put together until they have `least_nbytes`, and what is left at the end goes with the group before:
    a normalisation's few bytes would otherwise cost as many startups as a convolution's megabytes.
    """
    groups: list[Group] = []
    for name, own in _owners(module):
        if groups and _same_kind(own, groups[-1][1]) and _nbytes(groups[-1][1]) < least_nbytes:
            groups[-1] = _joined(groups[-1], (name, own))
        else:
            groups.append((name, own))
    if len(groups) > 1 and _same_kind(groups[-1][1], groups[-2][1]) and _nbytes(groups[-1][1]) < least_nbytes:
        groups[-2:] = [_joined(groups[-2], groups[-1])]
    return tuple(_layer(name, members) for name, members in groups)


def _owners(module: torch.nn.Module) -> Iterator[tuple[str, list[torch.nn.Parameter]]]:
    seen: set[int] = set()
    for name, submodule in module.named_modules():
        own = [p for p in submodule.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(id(parameter) for parameter in own)
        if own:
            yield name or "module", own


def _same_kind(own: list[torch.nn.Parameter], members: list[torch.nn.Parameter]) -> bool:
    return len({(each.dtype, each.device.type) for each in (*own, *members)}) == 1


def _nbytes(members: list[torch.nn.Parameter]) -> int:
    return sum(each.numel() * each.element_size() for each in members)


def _joined(group: Group, following: Group) -> Group:
    first, last = group[0].split(" .. ")[0], following[0].split(" .. ")[-1]
    return f"{first} .. {last}", group[1] + following[1]


def _layer(name: str, parameters: list[torch.nn.Parameter]) -> Layer:
    if not parameters:
        raise PlanError("the module has no parameters that require gradients; wanted at least one")
    kinds = {(parameter.dtype, parameter.device.type) for parameter in parameters}
    if len(kinds) > 1 or next(iter(kinds))[1] != "cpu":
        raise PlanError(f"layer {name!r} has parameters of {sorted(map(str, kinds))}; wanted one type, on the CPU")
    return Layer(name, tuple(parameters))
