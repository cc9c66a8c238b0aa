"""The layers of a module as flat buffers: what is sent, and where it comes from and goes to.

Buffers are in host memory, where messages are. Of a module on a GPU they are pinned, and a `Staging` moves gradients
down and averages or weights up, beside what the GPU computes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from penstock.errors import PlanError

Wait = Callable[[], None]


class Staging:
    """Copies between the tensors of a module in host memory and the buffers that are sent: at once."""

    pins = False  # memory of buffers
    is_late = False  # copies have to be waited for

    def fetch(self, values: torch.Tensor | None, place: torch.Tensor, divide_by: int = 1) -> Wait:
        """Start to copy `values`, divided, or zeros for None; return what waits until they are in their place."""
        if values is None:
            place.zero_()
        elif divide_by == 1:
            place.copy_(values)
        else:
            torch.div(values, divide_by, out=place)
        return _nothing

    def lend(self, place: torch.Tensor) -> torch.Tensor:
        """Return what is in a place as a gradient for the optimizer."""
        return place

    def put(self, place: torch.Tensor, parameter: torch.nn.Parameter) -> None:
        """Overwrite a parameter by what is in a place."""
        with torch.no_grad():
            parameter.copy_(place)


class DeviceStaging(Staging):
    """The same for a module on a GPU; copies down run on a stream of their own.

    What the host sends was waited for on the host. What comes up is queued on the stream that computes, so that the
    update and the layer's forward pass run behind it, and the host goes on. A place is filled again only behind all
    copies up that were queued before.
    """

    pins = is_late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up: list[torch.cuda.Event] = []  # copies up that the stream does not wait for yet

    def fetch(self, values: torch.Tensor | None, place: torch.Tensor, divide_by: int = 1) -> Wait:
        """Queue a copy of `values`, divided, or zeros for None; return what waits for it on the host."""
        source = values if values is None or divide_by == 1 else values / divide_by
        stream, done = self._stream, torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for event in self._up:
            stream.wait_event(event)
        self._up.clear()
        with torch.cuda.stream(stream):
            if source is not None:
                place.copy_(source, non_blocking=True)
                source.record_stream(stream)
            done.record(stream)

        def wait() -> None:
            done.synchronize()
            if source is None:
                place.zero_()

        return wait

    def lend(self, place: torch.Tensor) -> torch.Tensor:
        """Return what is in a place as a tensor on the device."""
        values = place.to(self._device, non_blocking=True)
        self._note()
        return values

    def put(self, place: torch.Tensor, parameter: torch.nn.Parameter) -> None:
        """Overwrite a parameter by what is in a place."""
        with torch.no_grad():
            parameter.copy_(place, non_blocking=True)
        self._note()

    def _note(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._up.append(event)


def staging_for(module: torch.nn.Module) -> Staging:
    """Return how a module's tensors come to be sent; refuse one that is on several devices, or one that cannot."""
    devices = {each.device for each in module.parameters() if each.requires_grad}
    if len(devices) > 1 or any(each.type not in ("cpu", "cuda") for each in devices):
        found = ", ".join(sorted(map(str, devices)))
        raise PlanError(f"the module's parameters are on {found}; wanted all in host memory or on one CUDA device")
    device = next(iter(devices), torch.device("cpu"))
    return DeviceStaging(device) if device.type == "cuda" else Staging()


def _nothing() -> None:
    """Wait for nothing."""


Group = tuple[str, list[torch.nn.Parameter]]  # submodules that travel together: their names, and what they own


@dataclass(frozen=True, eq=False)
class Layer:
    """Parameters that one submodule owns, with one buffer that holds all their elements."""

    name: str
    parameters: tuple[torch.nn.Parameter, ...]
    staging: Staging = field(default_factory=Staging)

    @cached_property
    def flat(self) -> torch.Tensor:
        """The elements of all parameters, then one for each, whose sum says how many ranks had a gradient."""
        numel = sum(parameter.numel() for parameter in self.parameters)
        return torch.empty(
            numel + len(self.parameters), dtype=self.parameters[0].dtype, pin_memory=self.staging.pins
        )  # fmt: skip

    def pack_gradients(self, divide_by: int) -> Wait:
        """Start to fill the buffer with the gradients, divided; a parameter without one counts as zero."""
        for parameter, used in zip(self.parameters, self._used(), strict=True):
            used.fill_(parameter.grad is not None)
        return self._packed([each.grad for each in self.parameters], divide_by)

    def lend_gradients(self) -> None:
        """Let the buffer be the gradients until they are forgotten; none where no rank had one."""
        for parameter, part, used in zip(self.parameters, self._parts(), self._used().tolist(), strict=True):
            parameter.grad = self.staging.lend(part) if used else None

    def pack_weights(self) -> Wait:
        """Start to fill the buffer with the weights."""
        return self._packed([each.detach() for each in self.parameters])

    def unpack_weights(self) -> None:
        """Write the buffer into the weights."""
        for parameter, part in zip(self.parameters, self._parts(), strict=True):
            self.staging.put(part, parameter)

    def _packed(self, values: Sequence[torch.Tensor | None], divide_by: int = 1) -> Wait:
        waits = [self.staging.fetch(each, part, divide_by) for each, part in zip(values, self._parts(), strict=True)]

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def _parts(self) -> Sequence[torch.Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = torch.split(self.flat[: sum(sizes)], sizes)
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    def _used(self) -> torch.Tensor:
        return self.flat[-len(self.parameters) :]


def one_layer(module: torch.nn.Module, staging: Staging | None = None) -> Layer:
    """Return the whole module as one layer."""
    return _layer(
        "all", [parameter for parameter in module.parameters() if parameter.requires_grad], staging or Staging()
    )


def layers_of(module: torch.nn.Module, least_nbytes: int = 0, staging: Staging | None = None) -> tuple[Layer, ...]:
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
    return tuple(_layer(name, members, staging or Staging()) for name, members in groups)


def _owners(module: torch.nn.Module) -> Iterator[tuple[str, list[torch.nn.Parameter]]]:
    seen: set[int] = set()
    for name, submodule in module.named_modules():
        own = [p for p in submodule.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(id(parameter) for parameter in own)
        if own:
            yield name or "module", own


def _same_kind(own: list[torch.nn.Parameter], members: list[torch.nn.Parameter]) -> bool:
    return len({each.dtype for each in (*own, *members)}) == 1


def _nbytes(members: list[torch.nn.Parameter]) -> int:
    return sum(each.numel() * each.element_size() for each in members)


def _joined(group: Group, following: Group) -> Group:
    first, last = group[0].split(" .. ")[0], following[0].split(" .. ")[-1]
    return f"{first} .. {last}", group[1] + following[1]


def _layer(name: str, parameters: list[torch.nn.Parameter], staging: Staging) -> Layer:
    if not parameters:
        raise PlanError("the module has no parameters that require gradients; wanted at least one")
    if len(kinds := {parameter.dtype for parameter in parameters}) > 1:
        raise PlanError(f"layer {name!r} has parameters of {', '.join(sorted(map(str, kinds)))}; wanted one type")
    return Layer(name, tuple(parameters), staging)
