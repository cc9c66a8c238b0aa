"""What each process of `tests/torch/test_stock_surface.py` does: use a feature of torch's wrapper, with torch and ours.

A case is a function of the wrapper class and its options. It returns what must be equal, whatever the wrapper is.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torch_training as training
from penstock.network import LinearCost
from penstock.plan import Bucket, Plan
from penstock.torch import DistributedDataParallel as OurDDP

Make = Callable[..., nn.Module]  # a wrapper of a module, with torch's options
STEPS = 6  # the plan comes after two profiled ones
ROUTES = ("native", "ring")


def run(rank: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return what each case gives with torch's wrapper and with ours, by route; an exception counts as a result."""
    return {name: {kind: _outcome(CASES[name], make, rank) for kind, make in _makers().items()} for name in names}


def _makers() -> dict[str, Make]:
    makers: dict[str, Make] = {"stock": TorchDDP}
    for route in ROUTES:
        makers[route] = _ours(route)
    return makers


def _ours(route: str) -> Make:
    """Return our wrapper on a network where the planner chooses `route`."""
    line = {"native": LinearCost(1.0, 0.0), route: LinearCost(1e-4, 1e-9)}
    network = replace(training.quick()["network"], all_reduce=line)

    def make(module: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        return OurDDP(
            module, *arguments, strategy="auto", network=network, profile_iterations=2, measure_seconds=0.5, **options
        )

    return make


def _outcome(case: Callable[[Make, int], Any], make: Make, rank: int) -> Any:
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return case(make, rank)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _train(wrapper: nn.Module, rank: int, steps: int = STEPS, inputs: Any = None) -> dict[str, Any]:
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05)
    for step in range(steps):
        loss = training._loss(wrapper, rank, step, {}) if inputs is None else wrapper(inputs(step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(wrapper)


def weights(wrapper: nn.Module) -> dict[str, Any]:
    """Return the parameters and buffers of the wrapped module."""
    return {name: value.detach().clone().numpy() for name, value in wrapper.module.state_dict().items()}


def static_graph_set_later(make: Make, rank: int) -> Any:
    wrapper = make(training.plain())
    wrapper._set_static_graph()
    return _train(wrapper, rank) | {"static": wrapper.static_graph, "logged": _logged(wrapper, "static_graph")}


def builtin_hook(make: Make, rank: int) -> Any:
    wrapper = make(training.plain())
    wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return _train(wrapper, rank) | {"logged": _logged(wrapper, "comm_hook")}


def sink_clone(make: Make, rank: int) -> Any:
    wrapper = make(training.Branches(), find_unused_parameters=True)
    wrapper._set_ddp_sink_clone(False)
    return _train(wrapper, rank) | {"clones": wrapper._ddp_sink_clone}


def buffers_of_their_own(make: Make, rank: int) -> Any:
    wrapper = make(training.normalised())
    wrapper.broadcast_buffers = False
    found = _train(wrapper, rank)
    return found | {"broadcasts": wrapper.broadcast_buffers}


def logged_iterations(make: Make, rank: int) -> Any:
    wrapper = make(training.plain())
    _train(wrapper, rank)
    wrapper.logger.set_runtime_stats_and_log()
    data = wrapper._get_ddp_logging_data()
    return {name: data.get(name) for name in ("iteration", "module_name", "world_size", "find_unused_parameters")}


def hooks_on_the_wrapper(make: Make, rank: int) -> Any:
    wrapper, seen = make(training.plain()), []
    wrapper.register_forward_pre_hook(lambda m, a, k: seen.append(("pre", sorted(k))), with_kwargs=True)
    wrapper.register_forward_hook(lambda m, a, k, out: seen.append(("post", sorted(k))), with_kwargs=True)
    wrapper.register_forward_hook(lambda m, a, out: seen.append(("always", len(a))), always_call=True)
    wrapper.register_full_backward_hook(lambda m, gi, go: seen.append(("backward", len(go))))
    for step in range(STEPS):
        wrapper(input=torch.ones(2, 8) * step).sum().backward()
    return {"seen": seen}


def another_group(make: Make, rank: int) -> Any:
    wrapper = make(training.plain())
    _train(wrapper, rank, 4)
    wrapper._update_process_group(dist.new_group([0, 1]))
    return _train(wrapper, rank)


def no_autograd_hooks(make: Make, rank: int) -> Any:
    wrapper = make(training.plain())
    wrapper._remove_autograd_hooks()
    return _train(wrapper, rank)


def unused_with_no_sync(make: Make, rank: int) -> Any:
    """The right branch is used in the first of two passes of every iteration, which does not synchronise."""
    wrapper = make(training.Branches(), find_unused_parameters=True, gradient_as_bucket_view=False)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05)
    for step in range(STEPS):
        with wrapper.no_sync():
            training._loss(wrapper, rank, 2 * step, {}).backward()
        training._loss(wrapper, rank, 2 * step + 1, {}).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(wrapper)


def optimizer_in_backward(make: Make, rank: int) -> Any:
    module = training.plain()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    wrapper = make(module, **({"gradient_as_bucket_view": True} if make is TorchDDP else {}))
    with _streams_on_the_cpu():
        for step in range(STEPS):
            training._loss(wrapper, rank, step, {}).backward()
    return weights(wrapper)


@contextlib.contextmanager
def _streams_on_the_cpu() -> Iterator[None]:
    """torch's own code for streams and events raises where there is no accelerator; here they need not do anything."""
    nothing = mock.MagicMock()
    with (
        mock.patch.object(torch.accelerator, "current_stream", return_value=nothing),
        mock.patch.object(torch, "Event", return_value=nothing),
        mock.patch.object(torch, "Stream", return_value=contextlib.nullcontext()),
    ):
        yield


def sliced_mesh(make: Make, rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    module = parallelize_module(training.plain(), mesh["tp"], {"0": ColwiseParallel()})
    wrapper = make(module, device_mesh=mesh["dp"])
    found = _train(wrapper, rank)
    assert not isinstance(wrapper, OurDDP) or any("0.weight" in each.tensors for each in wrapper.plan.buckets)
    return {name: value for name, value in found.items() if not name.startswith("0.")}


def power_sgd(make: Make, rank: int) -> Any:
    module = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    wrapper = make(module)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    wrapper.register_comm_hook(state, _first_bucket_of_power_sgd)
    found = _train(wrapper, rank)
    return found | {"compressed": sorted(state.error_dict)}


def _first_bucket_of_power_sgd(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Keep state by bucket, as torch's PowerSGD does (which chains collectives and so dies on gloo), and check it."""
    index, buffer = bucket.index(), bucket.buffer()
    if state.iter >= state.start_powerSGD_iter:
        kept = state.error_dict.setdefault(index, torch.zeros_like(buffer))
        assert kept.numel() == buffer.numel(), f"bucket {index} had {kept.numel()} elements and has {buffer.numel()}"
        buffer += kept
    state.iter += bucket.is_last()
    return default_hooks.allreduce_hook(None, bucket)


def ignored_first(make: Make, rank: int) -> Any:
    module = training.plain()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight", "0.bias"])
    found = _train(make(module), rank)
    return {name: value for name, value in found.items() if not name.startswith("0.")}


def ignored_without_gradient(make: Make, rank: int) -> Any:
    """The first parameter is ignored by DDP and never has a gradient: training is planned all the same."""

    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extra, self.body = nn.Linear(2, 2), training.plain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    module = Extra()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["extra.weight", "extra.bias"])
    wrapper = make(module)
    found = _train(wrapper, rank)
    assert not isinstance(wrapper, OurDDP) or wrapper.plan is not None, wrapper.explain()
    return {name: value for name, value in found.items() if name.startswith("body")}


def frozen_in_turns(make: Make, rank: int) -> Any:
    """A discriminator is frozen, as a whole, while its generator learns."""
    nets = nn.ModuleDict({"generator": nn.Linear(8, 8), "discriminator": nn.Linear(8, 1)})
    generator, discriminator = make(nets["generator"]), make(nets["discriminator"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (generator, discriminator)]
    for step in range(STEPS):
        x = torch.full((2, 8), 0.1 * (step + rank))
        for learns, optimizer in zip((False, True), optimizers, strict=True):
            discriminator.module.requires_grad_(learns)
            optimizer.zero_grad()
            fake = generator(x).detach() if learns else generator(x)
            discriminator(fake).square().mean().backward()
            optimizer.step()
    for each in (generator, discriminator):
        assert not isinstance(each, OurDDP) or each.plan is not None, each.explain()
    return {name: value.detach().clone().numpy() for name, value in nets.state_dict().items()}


def frozen_for_a_while(make: Make, rank: int) -> Any:
    """A layer is frozen, then learns again: before the first step, while profiling, and when the buckets change."""
    found = {}
    for first, last in ((0, 1), (0, 4), (1, 2), (2, 3), (3, 5)):
        module = training.plain()
        wrapper = make(module, find_unused_parameters=True)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05)
        for step in range(STEPS):
            module[0].requires_grad_(not first <= step < last)
            training._loss(wrapper, rank, step, {}).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not isinstance(wrapper, OurDDP) or wrapper.plan is not None, wrapper.explain()
        found |= {f"{first} to {last}: {name}": value for name, value in weights(wrapper).items()}
    return found


def planned_after_joining(make: Make, rank: int) -> Any:
    """Rank 0 has no data at all in `join`; what comes after it is planned."""
    wrapper = make(training.plain())
    for _ in range(3):
        with wrapper.join():
            _train(wrapper, rank, 2 * rank)
        _train(wrapper, rank)
        assert not isinstance(wrapper, OurDDP) or wrapper.plan is not None, wrapper.explain()
    return weights(wrapper)


def join_twice(rank: int) -> None:
    """Enter one context of `join` twice; rank 1 has data, rank 0 has none."""
    wrapper = OurDDP(training.plain(), **training.quick())
    context = wrapper.join()
    for _ in range(2):
        with context:
            _train(wrapper, rank, rank)


class _Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def sparse_gradients(make: Make, rank: int) -> Any:
    wrapper = make(_Embedded())
    return _train(wrapper, rank, inputs=lambda step: torch.tensor([rank, 3 + step, 3 + step]))


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.second = nn.Parameter(torch.randn(8, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.first @ self.second)


def complex_parameters(make: Make, rank: int) -> Any:
    return _train(make(_Complex()), rank, inputs=lambda step: torch.full((1, 8), 0.01 * (step + rank)))


def double_parameters(make: Make, rank: int) -> Any:
    wrapper = make(training.plain().double())
    return _train(wrapper, rank, inputs=lambda step: torch.full((2, 8), 0.1 * step + rank, dtype=torch.float64))


def positional_arguments(make: Make, rank: int) -> Any:
    """All that torch takes by position, up to skip_all_reduce_unused_params."""
    arguments = (None, None, 0, None, True, None, 1, False, False, True, True, None, None, None, None, True)
    wrapper = make(training.plain(), *arguments)
    return _train(wrapper, rank) | {"skips": wrapper.skip_all_reduce_unused_params, "static": wrapper.static_graph}


def argument_given_twice(make: Make, rank: int) -> Any:
    with contextlib.suppress(TypeError):
        make(training.plain(), None, device_ids=None)
        return "accepted"
    return "TypeError"


def too_many_arguments(make: Make, rank: int) -> Any:
    with contextlib.suppress(TypeError):
        make(training.plain(), *[None] * 40)
        return "accepted"
    return "TypeError"


def nested_wrappers(make: Make, rank: int) -> Any:
    inner = make(nn.Linear(8, 8))
    outer = nn.Sequential(inner, nn.ReLU(), nn.Linear(8, 4))
    TorchDDP._set_params_and_buffers_to_ignore_for_model(outer, ["0.module.weight", "0.module.bias"])
    return _train(make(outer), rank)


def hook_registered_later(make: Make, rank: int) -> Any:
    wrapper = make(training.plain())
    _train(wrapper, rank, 5)
    wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return _train(wrapper, rank)


def builtin_hook_registered_later(make: Make, rank: int) -> Any:
    wrapper = make(training.plain())
    _train(wrapper, rank, 5)
    wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return _train(wrapper, rank)


def compiled_graphs(make: Make, rank: int) -> Any:
    """How many graphs torch.compile makes on this rank, profiled or not: rank 0 alone is profiled."""
    graphs: list[int] = []

    def backend(module: Any, _: object) -> Any:
        graphs.append(len(list(module.graph.nodes)))
        return module.forward

    torch._dynamo.reset()
    wrapper = make(training.plain(), static_graph=True)
    running = torch.compile(wrapper, backend=backend)
    for step in range(STEPS):
        running(torch.full((2, 8), 0.1 * step)).sum().backward()
    return {"graphs": graphs}


def full_surface(make: Make, rank: int) -> Any:
    wrapper = make(training.plain(), bucket_cap_mb=1, find_unused_parameters=True, gradient_as_bucket_view=False)
    wrapper.eval()
    with torch.no_grad():
        wrapper(torch.ones(1, 8))
    wrapper.train()
    found = _train(wrapper, rank)
    wrapper._check_reducer_finalized()
    return found


CASES: dict[str, Callable[[Make, int], Any]] = {
    each.__name__: each
    for each in (
        static_graph_set_later, builtin_hook, sink_clone, buffers_of_their_own, logged_iterations,
        hooks_on_the_wrapper, another_group, no_autograd_hooks, unused_with_no_sync,
        optimizer_in_backward, sliced_mesh, power_sgd, ignored_first, ignored_without_gradient, sparse_gradients,
        complex_parameters, double_parameters, positional_arguments, argument_given_twice, too_many_arguments,
        nested_wrappers, hook_registered_later, builtin_hook_registered_later, compiled_graphs, full_surface,
        frozen_in_turns, frozen_for_a_while, planned_after_joining,
    )
}  # fmt: skip


def _logged(wrapper: nn.Module, name: str) -> Any:
    wrapper.logger.set_runtime_stats_and_log()
    return wrapper._get_ddp_logging_data().get(name)


def shrink_the_group(rank: int) -> dict[str, Any]:
    """Three ranks train with a codec, then two of them go on; return what they end with, and the plan's workers."""
    torch.manual_seed(1)
    wrapper = OurDDP(training.plain(), codec="onebit", **training.quick())
    _train(wrapper, rank, 4)
    before = wrapper.plan.workers
    group = dist.new_group([0, 1])
    if rank == 2:
        return {}
    wrapper._update_process_group(group)
    return _train(wrapper, rank, 4) | {"workers": (before, wrapper.plan.workers)}


# Bytes


class Wide(nn.Module):
    """Tensors large enough for headers not to count, in two planned buckets, and one that most passes do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = (nn.Linear(128, 128, bias=False) for _ in range(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.left(torch.relu(self.stem(x)))
        return hidden + (self.right(hidden) if self.calls % 2 else 0.0)


def used_routes(rank: int, cases: list[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each (strategy, codec as plans write it, options): bytes of two planned iterations, and how they went."""
    return [_bytes_of(rank, strategy, codec, dict(options)) for strategy, codec, options in cases]


def _bytes_of(rank: int, strategy: str, codec: str, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(3)
    how = {"autocast": options.pop("autocast", False)}
    unused = options.get("find_unused_parameters")
    module = Wide() if unused else nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3)))
    if "order" in options:
        ours: dict[str, Any] = {"plan": _plan(module, strategy, codec, options.pop("order"))}
    else:
        ours = {"codec": codec.replace("sparse", "gtopk"), "strategy": strategy, **_quick(strategy, codec)}
    wrapper = OurDDP(module, **ours, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):  # two are profiled, and the first after a plan has buckets in another order
            _wide_loss(wrapper, rank, step, how).backward()
        before = wrapper.bytes_sent()
        for step in range(10, 12):
            _wide_loss(wrapper, rank, step, how).backward()
    after = wrapper.bytes_sent()
    return {
        "ratio": (after.sent_nbytes - before.sent_nbytes) / (after.dense_nbytes - before.dense_nbytes),
        "explain": wrapper.explain(),
        "warned": [str(each.message) for each in caught if "not in the plan" in str(each.message)],
    }


def _quick(strategy: str, codec: str) -> dict[str, Any]:
    quick = training.quick()
    lines = dict(quick["network"].all_reduce) | {f"{strategy}+{codec}": LinearCost(1e-4, 1e-9)}
    return quick | {"network": replace(quick["network"], all_reduce=lines)}


def _plan(module: nn.Module, strategy: str, codec: str, order: str) -> Plan:
    """Two buckets of all tensors: in the order gradients become ready, or another one."""
    names = [name for name, _ in module.named_parameters()]
    names = names if order == "wrong" else names[::-1]
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in module.named_parameters()}
    split = names[:2], names[2:]
    return Plan(
        "m", 2, "hand", tuple(Bucket(tuple(part), sum(sizes[n] for n in part), strategy, codec) for part in split)
    )


def _wide_loss(wrapper: nn.Module, rank: int, step: int, how: dict[str, Any]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 128, generator=generator)
    with torch.autocast("cpu", torch.bfloat16) if how["autocast"] else contextlib.nullcontext():
        return wrapper(x).float().square().sum()


# Refusals

REFUSED = [
    ({"codec": "onebit", "delayed": True}, "codec 'onebit' with delay_all_reduce_named_params"),
    ({"codec": "onebit", "python_reducer": True}, "codec 'onebit' with torch._dynamo's optimize_ddp='python_reducer'"),
    ({"strategy": "ring", "hook": True}, "strategy 'ring' needs the hook for itself"),
]


def make_wrapper(rank: int, options: dict[str, Any]) -> None:
    """Make a wrapper with options that do not go together."""
    options, module = dict(options), training.plain()
    if options.pop("delayed", False):
        last = list(module.named_parameters())[-1]
        options |= {"delay_all_reduce_named_params": [last], "param_to_hook_all_reduce": module[0].weight}
    hook = options.pop("hook", False)
    reducer = "python_reducer" if options.pop("python_reducer", False) else True
    with torch._dynamo.config.patch(optimize_ddp=reducer):
        wrapper = OurDDP(module, **options)
    if hook:
        wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
