"""Algorithm 1 of Wang et al., and its modern form: communicate while computing, layer by layer."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from penstock.adaptor.buckets import Gradient, Zeros
from penstock.adaptor.session import Session
from penstock.adaptor.world import World
from penstock.errors import PlanError
from penstock.exchange.compression import AUTO, Compression, Scheme, from_options
from penstock.exchange.exchange import ResolvedBucket
from penstock.exchange.parameter_state import Memory, Scaler
from penstock.plan import Bucket, Plan
from penstock.planning.planning import Planning
from penstock.strategies import coded_only_names, names, sparse_names
from penstock.torch.checkpoint import TorchMemory
from penstock.torch.layers import Layer, Wait, layers_of
from penstock.torch.synchronous import ROOT, Algorithm, forget_gradients

ALL_REDUCES = (*names("all_reduce"), *coded_only_names(), *sparse_names())  # that a bucket may travel by
OWN_PLANNER = "layers"  # by which buckets are the wrapper's layers
Settings = list[dict[str, Any]]  # of each of an optimizer's groups of parameters: learning rate, momentum, ...
Needs = dict[torch.nn.Module, tuple[Layer, ...]]


class Layered(Algorithm):
    """Communicates layer by layer: gradients as soon as backward has them, what comes of them before the next forward.

    Each layer has an optimizer of its own, which steps where all that it needs is there.
    """

    least_nbytes = 0  # of a layer, smaller neighbours together; Algorithm 1 sends every layer by itself

    def begin(self) -> None:
        """Start from rank 0's weights, with an optimizer per layer and hooks on gradients and layers."""
        super().begin()
        self.layers = layers_of(self.module, self.least_nbytes, self.staging)
        self.optimizers = {layer: self.make_optimizer(layer.parameters) for layer in self.layers}
        self.given: set[torch.nn.Parameter] = set()  # whose gradients are on their way
        self.coming: set[Layer] = set()  # layers that have yet to be updated
        self.owners = {parameter: layer for layer in self.layers for parameter in layer.parameters}
        self.calls = Calls(self.module, self.owners)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in self.owners
        ]
        self.handles += [each.register_forward_pre_hook(self._before_module) for each in self.module.modules()]
        self.handles.append(self.module.register_state_dict_pre_hook(lambda *_: self.finish()))  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Send what has not been sent and start the second half; it goes on during the next forward pass."""
        try:
            for layer in reversed(self.layers):
                if not self.given.issuperset(layer.parameters):  # some parameter had no gradient this time
                    self._arrive(layer)  # nor was it needed, perhaps
            self._second_half()
        finally:  # also of a step that failed: once a state is loaded, training goes on
            self.given.clear()
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

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        self._check_order(parameter)
        if self.sends:
            self.given.add(parameter)
            self._send(parameter)

    def _check_order(self, parameter: torch.nn.Parameter) -> None:
        """Refuse gradients that would be lost, and those of weights from before the last step."""
        layer = self.owners[parameter]
        if parameter in self.given:
            raise PlanError(
                f"layer {layer.name!r}: a second backward pass before step(), when its gradients are on their way; "
                "run all but the last backward pass in no_sync()"
            )
        if layer in self.coming:
            raise PlanError(
                f"layer {layer.name!r} was used without calling its module, as all passes before did; its weights were "
                "those before the last step: use algorithm='all_reduce' for such a model"
            )

    def _before_module(self, module: torch.nn.Module, _inputs: Any) -> None:
        for layer in self.calls.before(module):
            self._arrive(layer)

    def _arrive(self, layer: Layer) -> None:
        if layer in self.coming:
            self.coming.remove(layer)
            self._update(layer)

    def _send(self, parameter: torch.nn.Parameter) -> None:
        raise AssertionError("each algorithm has its own")

    def _second_half(self) -> None:
        raise AssertionError("each algorithm has its own")

    def _update(self, layer: Layer) -> None:
        raise AssertionError("each algorithm has its own")


class Layers(Layered):
    """Algorithm 1: a layer's gradients travel during backward of the layer below, its weights during forward of it.

    Gradients are sent in one order on all ranks: the last layer first.
    """

    operations = ("reduce", "broadcast")

    def begin(self) -> None:
        """Start with nothing under way."""
        super().begin()
        self.sent: dict[Layer, Future[None]] = {}
        self.weights: dict[Layer, Future[None]] = {}

    def _send(self, parameter: torch.nn.Parameter) -> None:
        for layer in reversed(self.layers):
            if layer not in self.sent:
                if not self.given.issuperset(layer.parameters):
                    return
                self._reduce(layer)

    def _reduce(self, layer: Layer) -> None:
        packed = layer.pack_gradients(self.sender.world_size)
        self.sent[layer] = self.sender.start("reduce", layer.flat, packed, root=ROOT, **self._by("reduce"))

    def _second_half(self) -> None:
        for layer in reversed(self.layers):
            if layer not in self.sent:
                self._reduce(layer)
        for layer in self.layers:
            self.sent.pop(layer).result()
            packed = None
            if self.sender.rank == ROOT:
                layer.lend_gradients()
                self.optimizers[layer].step()
                packed = layer.pack_weights()
            self.weights[layer] = self.sender.start("broadcast", layer.flat, packed, root=ROOT, **self._by("broadcast"))
        self.coming.update(self.layers)

    def _update(self, layer: Layer) -> None:
        self.weights.pop(layer).result()
        layer.unpack_weights()


class Split(Layered):
    """An all-reduce in two halves; a layer is updated just before its next forward pass, when both are here.

    Gradients travel through an exchange (`exchange/`), in the buckets and by the routes of a plan. Which parameters had
    a gradient on any rank travels beside them: the others are not updated.
    """

    least_nbytes = 2 << 20

    def begin(self) -> None:
        """Start from rank 0's weights, with a session for the gradients."""
        super().begin()
        trained = {name: each for name, each in self.module.named_parameters() if each in self.owners}
        self.numbers = {parameter: number for number, parameter in enumerate(trained.values())}
        layers = [layer.parameters for layer in self.layers]
        name = type(self.module).__name__
        pins = self.staging.pins
        self.session = make_session(self.world, trained, layers, name, self.strategy, self.options, pins)
        self.copies = ThreadPoolExecutor(1, "penstock-copies") if self.staging.is_late else None  # waits for them
        self.copied: list[Future[None]] = []  # of this iteration's gradients
        self.settings: dict[Layer, Settings] = {}  # of optimizers whose step is put off
        self.used = torch.zeros(len(trained))  # by parameter: on how many ranks it had a gradient
        self.counted: Future[None] | None = None  # once `used` is that

    def begin_forward(self) -> None:
        """Note that a forward pass begins."""
        self.session.begin()

    def _send(self, parameter: torch.nn.Parameter) -> None:
        number = self.numbers[parameter]
        wait = self.staging.fetch(parameter.grad, self.session.place(number))
        if self.copies is None:
            self._came(wait, number)
        else:  # backward goes on meanwhile
            self.copied.append(self.copies.submit(self._came, wait, number))

    def _came(self, wait: Wait, number: int) -> None:
        wait()
        self.session.came(number)

    def _second_half(self) -> None:
        for parameter, number in self.numbers.items():
            self.used[number] = float(parameter.grad is not None)
        self.counted = self.sender.start("all_reduce", self.used, strategy="native")
        for parameter in reversed(self.numbers):
            if parameter not in self.given:
                self._send(parameter)
        copied, self.copied = self.copied, []
        for each in copied:
            each.result()
        self.settings = {layer: settings_of(optimizer) for layer, optimizer in self.optimizers.items()}
        if self.session.is_planning:  # which ends with other buckets: everything is done before that
            averages: list[Any] = self.session.wait()
            for layer in self.layers:
                self._apply(layer, [averages[self.numbers[each]] for each in layer.parameters])
        else:
            self.session.leave()
            self.coming.update(self.layers)

    def _update(self, layer: Layer) -> None:
        try:
            averages = [self.session.arrive(self.numbers[each]) for each in layer.parameters]
        except Exception:
            self.coming.clear()  # no other average comes
            raise
        self._apply(layer, averages)

    def _apply(self, layer: Layer, averages: Sequence[torch.Tensor]) -> None:
        """Update a layer; a parameter without a gradient on any rank stays as it is."""
        assert self.counted is not None
        self.counted.result()
        for parameter, average in zip(layer.parameters, averages, strict=True):
            parameter.grad = self.staging.lend(average) if self.used[self.numbers[parameter]] else None
        step_with(self.optimizers[layer], self.settings[layer])
        forget_gradients(layer)

    def finish(self) -> None:
        """Wait for all second halves."""
        super().finish()
        self.session.land()

    def close(self) -> None:
        """Finish, remove the hooks and end the communication threads."""
        super().close()
        if self.copies is not None:
            self.copies.shutdown()
        self.session.close()


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


class TorchSession(Session):
    """A session whose gradients, averages and saved states are tensors in host memory, pinned for those of a GPU."""

    def __init__(self, *arguments: Any, pins: bool = False, **options: Any) -> None:
        self._pins = pins
        super().__init__(*arguments, **options)

    def _new_memory(self, scheme: Scheme, on_nonfinite: str, scaler: Scaler | None) -> Memory:
        return TorchMemory(scheme, on_nonfinite, scaler)

    def _divides(self, bucket: ResolvedBucket) -> bool:
        return False  # what is put into it comes from torch

    def _zeros(self) -> Zeros:
        return partial(_zeros, self._pins)


def _zeros(pins: bool, sizes: Sequence[int], dtype: str) -> torch.Tensor:
    return torch.zeros(sum(sizes), dtype=getattr(torch, dtype), pin_memory=pins)


def make_session(
    world: World,
    parameters: Mapping[str, torch.nn.Parameter],  # those that are trained
    layers: Sequence[Iterable[torch.nn.Parameter]],  # in the order of the forward pass
    model: str,
    strategy: str,  # empty: chosen
    options: dict[str, Any],  # compression, planning, and the fields of both, as `DistributedDataParallel` takes them
    pins: bool = False,  # gradients come from a GPU
) -> TorchSession:
    """Return the session of a model; all ranks together. Without planning= or a field of it, a bucket is a layer."""
    compression = from_options(Compression, options.pop("compression", None), "compression", options)
    plans = "planning" in options or any(each.name in options for each in fields(Planning))
    options |= {"strategy": strategy} if strategy.partition("(")[0] in ALL_REDUCES else {}
    planning = from_options(Planning, options.pop("planning", None), "planning", options)
    if options:
        raise TypeError(f"BulkSynchronous() got an unexpected keyword argument {next(iter(options))!r}")
    if planning.replan_drift:
        raise PlanError(
            "replan_drift with algorithm 'split', whose buckets are under way between iterations; leave it out"
        )
    scheme = compression.scheme()
    leaves_out = scheme.codec is not None or scheme.momentum.is_used or planning.plan is not None
    if not plans and scheme.codec != AUTO:
        planning = Planning(
            strategy=planning.strategy, plan=_own_plan(world, parameters, layers, scheme, planning.strategy)
        )
    gradients = [
        Gradient(name, tuple(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in parameters.items()
    ]
    return TorchSession(
        world,
        gradients,
        compression=compression,
        planning=planning,
        framework="torch",
        model=model,
        halves=True,
        leaves_out=leaves_out,
        pins=pins,
    )


def _own_plan(
    world: World,
    parameters: Mapping[str, torch.nn.Parameter],
    layers: Sequence[Iterable[torch.nn.Parameter]],
    scheme: Scheme,
    strategy: str,
) -> Plan:
    """Return a plan with a bucket for each layer, the last first."""
    chosen = strategy if strategy != AUTO else "ring" if scheme.codec is None else scheme.strategies[0]
    scheme.check_strategy(chosen)
    names_of = {id(each): name for name, each in parameters.items()}
    buckets = []
    for layer in reversed([tuple(each) for each in layers]):
        held = tuple(names_of[id(each)] for each in reversed(layer))
        buckets.append(Bucket(held, sum(each.nbytes for each in layer), chosen, scheme.codec))
    return Plan("model", world.size, OWN_PLANNER, tuple(buckets))
