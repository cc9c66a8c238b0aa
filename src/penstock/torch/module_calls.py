"""Which layers a module's forward pass needs: those it owns, and those of parts below it that nobody calls.

Weights are not always read by the module that owns them: attention reads its output projection's, a model those of a
`ParameterList`. Such a part is never called, and whoever is called next above it stands in for it. Who is called shows
in the first pass, before any weights are on their way; who is left out of a later one stays the business of those above
it from then on.
"""

from collections.abc import Mapping

import torch

from penstock.torch.layers import Layer

Needs = dict[torch.nn.Module, tuple[Layer, ...]]


class Calls:
    """The modules below one module, as they are called."""

    def __init__(self, module: torch.nn.Module, owners: Mapping[torch.nn.Parameter, Layer]) -> None:
        """`owners` has the layer of every trained parameter."""
        self._names = dict(module.named_modules(remove_duplicate=False))
        self._own = {each: _layers(each, owners) for each in self._names.values()}
        self._since: set[torch.nn.Module] = set()  # called since the last step
        self._always: set[torch.nn.Module] | None = None  # called before every step so far
        self._needs: Needs = self._own
        self.unannounced: tuple[Layer, ...] = ()  # that nobody called stands in for

    def before(self, module: torch.nn.Module) -> tuple[Layer, ...]:
        """Note that a module is called; return the layers that must be here for it."""
        self._since.add(module)
        return self._needs[module]

    def step(self) -> None:
        """Note that a step is taken: whoever was not called since the last is not relied on."""
        always = self._since if self._always is None else self._always & self._since
        if always != self._always:
            self._always, (self._needs, self.unannounced) = always, self._stood_in_for(always)
        self._since = set()

    def _stood_in_for(self, always: set[torch.nn.Module]) -> tuple[Needs, tuple[Layer, ...]]:
        needs, unannounced = {each: list(own) for each, own in self._own.items()}, list[Layer]()
        for name, part in self._names.items():
            if part not in always and self._own[part]:
                above = next((each for each in self._above(name) if each in always), None)
                (unannounced if above is None else needs[above]).extend(self._own[part])
        return {each: tuple(dict.fromkeys(layers)) for each, layers in needs.items()}, tuple(unannounced)

    def _above(self, name: str) -> list[torch.nn.Module]:
        """Return the modules that contain one, the nearest first."""
        parts = name.split(".")
        return [self._names[".".join(parts[:count])] for count in reversed(range(len(parts)))] if name else []


def _layers(module: torch.nn.Module, owners: Mapping[torch.nn.Parameter, Layer]) -> tuple[Layer, ...]:
    return tuple(dict.fromkeys(owners[each] for each in module.parameters(recurse=False) if each.requires_grad))
