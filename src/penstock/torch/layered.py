"""Algorithm 1 of Wang et al., and its modern form: communicate while computing, layer by layer."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from penstock.errors import PlanError
from penstock.torch.layers import Layer, layers_of
from penstock.torch.synchronous import ROOT, Algorithm, forget_gradients

Settings = list[dict[str, Any]]  # of each of an optimizer's groups of parameters: learning rate, momentum, ...
Needs = dict[torch.nn.Module, tuple[Layer, ...]]
BLOCK_NUMEL = 512 * 1024  # 2 MiB of float32: 61 MB took 4 ranks 0.47 s of processor time, in quarters 0.66


class Layered(Algorithm):
    """Sends layer by layer: gradients as soon as backward has them, in one order on all ranks: the last layer first."""

    gradients_by = "reduce"
    least_nbytes = 0  # of a layer, smaller neighbours together; Algorithm 1 sends every layer by itself

    def begin(self) -> None:
        """Start from rank 0's weights, with an optimizer per layer and hooks on gradients and layers."""
        super().begin()
        self.layers = layers_of(self.module, self.least_nbytes)
        self.optimizers = {layer: self.make_optimizer(layer.parameters) for layer in self.layers}
        self.settings: dict[Layer, Settings] = {}  # of optimizers whose step is put off
        self.ready: dict[Layer, int] = dict.fromkeys(self.layers, 0)  # parameters whose gradient has come
        self.lane = {layer: index % self.lanes for index, layer in enumerate(self.layers)}
        self.sent: dict[Layer, Future[None]] = {}
        self.coming: dict[Layer, Future[None]] = {}  # second halves on their way
        owners = {parameter: layer for layer in self.layers for parameter in layer.parameters}
        self.calls = Calls(self.module, owners)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, layer))  # type: ignore[no-untyped-call]
            for parameter, layer in owners.items()
        ]
        self.handles += [each.register_forward_pre_hook(self._before_module) for each in self.module.modules()]
        self.handles.append(self.module.register_state_dict_pre_hook(lambda *_: self.finish()))  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Send what has not been sent and start the second half; it goes on during the next forward pass."""
        for layer in reversed(self.layers):
            if layer not in self.sent:  # some parameter had no gradient this time
                self._arrive(layer)  # nor was it needed, perhaps
                self._send_gradients(layer)
        self._second_half()
        self.sent.clear()
        self.ready = dict.fromkeys(self.layers, 0)
        for layer in self.layers:
            forget_gradients(layer)
        self.calls.step()
        for layer in self.calls.unannounced:
            self._arrive(layer)

    def every_optimizer(self) -> Sequence[torch.optim.Optimizer]:
        """Return the optimizer of each layer."""
        return list(self.optimizers.values())

    def finish(self) -> None:
        """Wait for all second halves."""
        for layer in self.layers:
            self._arrive(layer)

    def close(self) -> None:
        """Finish, remove the hooks and end the communication thread."""
        self.finish()
        for handle in self.handles:
            handle.remove()
        self.sender.close()

    def _on_gradient(self, layer: Layer, _: torch.nn.Parameter) -> None:
        self._check_order(layer)
        if not self.sends:
            return
        self.ready[layer] += 1
        for candidate in reversed(self.layers):
            if candidate in self.sent:
                continue
            if self.ready[candidate] < len(candidate.parameters):
                return
            self._send_gradients(candidate)

    def _check_order(self, layer: Layer) -> None:
        """Refuse gradients that would be lost, and those of weights from before the last step."""
        if layer in self.sent:
            raise PlanError(
                f"layer {layer.name!r}: a second backward pass before step(), when its gradients are on their way; "
                "run all but the last backward pass in no_sync()"
            )
        if layer in self.coming:
            raise PlanError(
                f"layer {layer.name!r} was used without calling its module, as all passes before did; its weights were "
                "those before the last step: use algorithm='all_reduce' for such a model"
            )

    def _send_gradients(self, layer: Layer) -> None:
        layer.pack_gradients(self.sender.world_size)
        options = self._first_options()
        self.sent[layer] = self.sender.start(self.gradients_by, layer.flat, self.lane[layer], **options)

    def _before_module(self, module: torch.nn.Module, _inputs: Any) -> None:
        for layer in self.calls.before(module):
            self._arrive(layer)

    def _first_options(self) -> dict[str, Any]:
        return self._by(self.gradients_by)

    def _second_half(self) -> None:
        raise AssertionError("each algorithm has its own")

    def _arrive(self, layer: Layer) -> None:
        raise AssertionError("each algorithm has its own")


class Layers(Layered):
    """Algorithm 1: a layer's gradients travel during backward of the layer below, its weights during forward of it."""

    def _first_options(self) -> dict[str, Any]:
        return {"root": ROOT, **self._by("reduce")}

    def _second_half(self) -> None:
        for layer in self.layers:
            self.sent[layer].result()
            if self.sender.rank == ROOT:
                layer.lend_gradients()
                self.optimizers[layer].step()
                layer.pack_weights()
            self.coming[layer] = self.sender.start("broadcast", layer.flat, root=ROOT, **self._by("broadcast"))

    def _arrive(self, layer: Layer) -> None:
        if (coming := self.coming.pop(layer, None)) is not None:
            coming.result()
            layer.unpack_weights()


class Split(Layered):
    """An all-reduce in two halves; a layer is updated just before its next forward pass, when both are here.

    Neighbouring layers travel in two lanes: while the steps of one collective wait for a busy rank, the other's bytes
    keep the wire busy. Both halves of a layer are in one lane, so that the second comes after the first.
    """

    lanes = 2
    gradients_by = "reduce_scatter"
    least_nbytes = 2 << 20

    def _by(self, operation: str) -> dict[str, Any]:
        """Cut chunks into few blocks: what the interpreter does for each is taken from computation all the time."""
        return {"block_numel": BLOCK_NUMEL, **super()._by(operation)}

    def _second_half(self) -> None:
        for layer in self.layers:
            self.settings[layer] = settings_of(self.optimizers[layer])
            options = self._by("all_gather")
            self.coming[layer] = self.sender.start("all_gather", layer.flat, self.lane[layer], **options)

    def _arrive(self, layer: Layer) -> None:
        if (coming := self.coming.pop(layer, None)) is not None:
            coming.result()
            layer.lend_gradients()
            step_with(self.optimizers[layer], self.settings[layer])
            forget_gradients(layer)


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """Return an optimizer's settings as they are now, for a step that is taken later.

    A scheduler changes learning rates after `step()`, which in plain training has been taken by then.
    """
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def step_with(optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    """Take a step with settings of before; those that were changed since hold again afterwards."""
    groups = optimizer.param_groups
    changed = [
        {name: group[name] for name, value in before.items() if group[name] is not value}
        for group, before in zip(groups, settings, strict=True)
    ]
    for group, before in zip(groups, settings, strict=True):
        group.update(before)
    optimizer.step()
    for group, since in zip(groups, changed, strict=True):
        group.update(since)


class Calls:
    """Which layers each module's forward pass needs: its own, and those of modules below it that are never called.

    Weights are not always read by the module that owns them: attention reads its output projection's, a model those of
    a `ParameterList`. Such a module is never called, and the nearest one above it that is called needs its layers. The
    first pass shows which are called, before any weights are on their way; one that is left out of a later pass counts
    as never called from then on.
    """

    def __init__(self, module: torch.nn.Module, owners: Mapping[torch.nn.Parameter, Layer]) -> None:
        """`owners` has the layer of every trained parameter."""
        self._names = dict(module.named_modules(remove_duplicate=False))
        self._own = {each: _layers(each, owners) for each in self._names.values()}
        self._since: set[torch.nn.Module] = set()  # called since the last step
        self._always: set[torch.nn.Module] | None = None  # called before every step so far
        self._needs: Needs = self._own
        self.unannounced: tuple[Layer, ...] = ()  # of modules with none above them that is called

    def before(self, module: torch.nn.Module) -> tuple[Layer, ...]:
        """Note that a module is called; return the layers that must be here for it."""
        self._since.add(module)
        return self._needs[module]

    def step(self) -> None:
        """Note that a step is taken: a module that was not called since the last counts as never called."""
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
