"""What each process of a test does whose ranks must end alike: all raise the same, or all go on the same."""

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import penstock.compll
from penstock.compll.operators import OPERATORS, Operator
from penstock.plan import Bucket, Plan
from penstock.runtime import hosts as places
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch import comm_hook
from torch_compressed import Echo, echo_inputs

SIGNS = (Path(penstock.compll.__file__).parent / "algorithms" / "signsgd.cll").read_text()
TWICE = """
void encode(float* gradient, uint8* compressed) { compressed = concat(twice(gradient)); }
void decode(uint8* compressed, float* gradient) { float* sent = extract(compressed); gradient = twice(sent); }
"""


def told(call: Any) -> str:
    """Return what a call raised."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def convolutions(bias: bool = True) -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=bias), nn.Conv2d(4, 4, 3, bias=bias))


def _two_types() -> nn.Module:
    """Return a module that cannot hold plans."""
    return nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2).double()})


def different_options(rank: int) -> dict[str, str]:
    """Give this rank other options than the others; return what each of them raises."""
    other = rank == 1
    pairs: dict[str, tuple[Any, Any]] = {
        "find_unused_parameters": (False, True),
        "static_graph": (False, True),
        "gradient_as_bucket_view": (True, False),
        "bucket_cap_mb": (25, 1),
        "skip_all_reduce_unused_params": (False, True),
        "on_nonfinite": ("raise", "skip"),
    }
    found = {name: told(lambda n=name, v=values[other]: OurDDP(Echo(), **{n: v})) for name, values in pairs.items()}
    found["torch's buckets"] = told(lambda: OurDDP(_two_types(), find_unused_parameters=other))
    found["by default"] = told(
        lambda: OurDDP(Echo(), **({"static_graph": False, "bucket_cap_mb": None} if other else {}))
    )
    for name in ("find_unused_parameters", "on_nonfinite"):
        found[f"hook, {name}"] = told(lambda n=name: comm_hook("ring", "onebit", **{n: pairs[n][other]}))
    return found


def different_models(rank: int) -> dict[str, str]:
    """Give this rank another model than the others; return what each of them raises."""
    other, model = rank == 1, convolutions()
    models = {
        "shape": nn.Linear(4, 3 if other else 2),
        "name": nn.ModuleDict({"b" if other else "a": nn.Linear(2, 2)}),
        "order": nn.ModuleDict({name: nn.Linear(2, 2) for name in ("ba" if other else "ab")}),
        "memory": model.to(memory_format=torch.channels_last) if other else model,
        "count": convolutions(bias=not other),
        "frozen": nn.Linear(2, 2).requires_grad_(not other),
    }
    found = {name: told(lambda module=module: OurDDP(module)) for name, module in models.items()}
    found["hook"] = told(lambda: comm_hook("ring", "onebit", module=models["shape"]))
    ignoring = nn.ModuleDict({"all": nn.Linear(2, 2), "own": nn.Linear(2, 3 if other else 2)})
    TorchDDP._set_params_and_buffers_to_ignore_for_model(ignoring, ["own.weight", "own.bias"])
    found["ignored"] = told(lambda: OurDDP(ignoring))
    return found


def different_texts(rank: int, folder: str) -> dict[str, str]:
    """Write another text to the same path as the others see it, or have another operator; return what is raised."""
    name = Path(folder) / str(rank)
    name.mkdir()
    (name / "mine.cll").write_text(SIGNS.replace("? 1 :", f"? {rank + 1} :"))
    (name / "twice.cll").write_text(TWICE)
    factor = f"def twice(values):\n    return values * np.float32({rank + 1})\n"
    OPERATORS["twice"] = Operator("twice", 1, 0, numpy=lambda values: values, numba=factor, triton=factor)
    found = {}
    with contextlib.chdir(name):  # as on another host
        for codec in ("mine.cll", "twice.cll"):
            plan = Plan("echo", dist.get_world_size(), "hand", (Bucket(("second", "first"), 228, "ring", codec),))
            found[f"{codec}, codec"] = told(lambda c=codec: OurDDP(Echo(), codec=c))
            found[f"{codec}, plan"] = told(lambda p=plan: OurDDP(Echo(), plan=p))
            found[f"{codec}, hook"] = told(lambda c=codec: comm_hook("ring", c))
        found["mine.cll, candidate"] = told(lambda: OurDDP(Echo(), codec="auto", candidates=["mine.cll"]))
    return found


def nan_on_hosts(rank: int, hosts: str) -> list[Any]:
    """Have NaN on the last rank, which leads no host; return what was raised, and which steps were taken otherwise."""
    places.network_namespace = lambda: ord(hosts[rank])
    return [_nan_on_hosts(rank, hosts, on_nonfinite) for on_nonfinite in ("raise", "skip")]


def _nan_on_hosts(rank: int, hosts: str, on_nonfinite: str) -> Any:
    plan = Plan("echo", len(hosts), "hand", (Bucket(("second", "first"), 228, "hierarchical", "onebit"),))
    wrapper = OurDDP(Echo(), plan=plan, on_nonfinite=on_nonfinite)
    taken = []
    for step in range(4):
        inputs = echo_inputs(rank, step)
        if rank == len(hosts) - 1 and step == 2:
            inputs[3] = torch.nan
        if (error := told(lambda i=inputs: wrapper(i).backward())) != "no error":
            return error
        if all(torch.isfinite(each.grad).all() for each in wrapper.parameters()):
            taken.append(step)
        wrapper.zero_grad()
    return taken


def scale_down(rank: int) -> list[Any]:
    """Train with fp16 and a gradient scaler, with one that the wrapper does not know of, and with bf16."""
    return [_scale_down(rank, *each) for each in (("fp16", True), ("fp16", False), ("bf16", True))]


def _scale_down(rank: int, codec: str, tells: bool) -> Any:
    """Train with a scale that is too large for a half; return all scales and what was applied, or what is raised."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
    plan = Plan("echo", dist.get_world_size(), "hand", (Bucket(("second", "first"), 228, "ring", codec),))
    wrapper = OurDDP(module := Echo(), plan=plan, grad_scaler=scaler if tells else None)
    optimizer, scales = torch.optim.SGD(wrapper.parameters(), lr=1.0), []
    for _ in range(12):
        loss = wrapper(torch.ones(57) if rank == 0 else torch.zeros(57))
        if (error := told(lambda one=loss: scaler.scale(one).backward())) != "no error":
            return error
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, (-torch.cat([module.first, module.second])).tolist()


class Kernels(nn.Module):
    """Weights of a convolution, and of one of a single pixel, whose gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(shape)) for shape in ((4, 8, 3, 3), (5, 7, 1, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.split([self.first.numel(), self.second.numel()])
        return (self.first * first.view_as(self.first)).sum() + (self.second * second.view_as(self.second)).sum()

    def flat(self) -> torch.Tensor:
        """Return all weights in logical order."""
        return torch.cat([each.detach().contiguous().flatten() for each in self.parameters()])


def _kernel_inputs(rank: int, step: int) -> torch.Tensor:
    """Return values of which no two are alike: which are the largest does not depend on their order."""
    return torch.randn(323, generator=torch.Generator().manual_seed(1000 * step + rank))


def _kernel_wrapper(module: Kernels, momentum: float, **options: Any) -> Any:
    plan = Plan("kernels", 2, "hand", (Bucket(("second", "first"), 4 * 323, "gtopk", "sparse(density=0.1)"),))
    return OurDDP(module, plan=plan, momentum=momentum, **options)


def _train_kernels(wrapper: Any, rank: int, steps: range) -> None:
    for step in steps:
        wrapper(_kernel_inputs(rank, step)).backward()
        with torch.no_grad():
            for parameter in wrapper.parameters():
                parameter -= parameter.grad
                parameter.grad = None


def _gathered(state: Any) -> list[Any]:
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def resume_in_other_memory_format(rank: int) -> list[Any]:
    """Resume from either format in the other, with momentum and without."""
    return [
        _resume_in_other_memory_format(rank, momentum, before) for momentum in (0.0, 0.5) for before in (False, True)
    ]


def _resume_in_other_memory_format(rank: int, momentum: float, before: bool) -> Any:
    """Train 4 + 4 steps, the second four in the other memory format, and 8 in one; `before`: the first four are in
    channels_last. Return both weights and what is owed, in logical order."""
    formats = [torch.contiguous_format, torch.channels_last]
    first, second = formats[::-1] if before else formats
    whole, parts = Kernels().to(memory_format=first), Kernels().to(memory_format=first)
    unbroken, wrapper = _kernel_wrapper(whole, momentum), _kernel_wrapper(parts, momentum)
    _train_kernels(unbroken, rank, range(8))
    _train_kernels(wrapper, rank, range(4))
    states = _gathered(wrapper.exchange_state_dict())
    wrapper = _kernel_wrapper(parts.to(memory_format=second), momentum)
    wrapper.load_exchange_state_dict(states)
    _train_kernels(wrapper, rank, range(4, 8))
    owed = [each.exchange_state_dict()["memories"] for each in (unbroken, wrapper)]
    kept = [
        torch.cat([each[kind][name].flatten() for kind in each for name in ("first", "second") if each[kind]])
        for each in owed
    ]
    return whole.flat().numpy(), parts.flat().numpy(), *(each.numpy() for each in kept)


def change_memory_format(rank: int) -> list[str]:
    """Change the memory format of a wrapped model: after some steps, and, with torch's buckets, before the first one.

    A plan's buckets are made in the first step, whatever the format was when the model was wrapped.
    """
    found, module = [], Kernels()
    wrapper = _kernel_wrapper(module, 0.0)
    module.to(memory_format=torch.channels_last)
    found.append(told(lambda: _train_kernels(wrapper, rank, range(2))))
    module.to(memory_format=torch.contiguous_format)
    found.append(told(lambda: _train_kernels(wrapper, rank, range(2))))
    bare = TorchDDP(module := Kernels())
    bare.register_comm_hook(*comm_hook("gtopk", "sparse(density=0.1)", module=module))
    module.to(memory_format=torch.channels_last)
    found.append(told(lambda: bare(_kernel_inputs(rank, 0)).backward()))
    return found


def load_what_is_wrong(rank: int) -> dict[str, Any]:
    """Load states that are wrong on one rank, or not the same; return what is raised, and that nothing was changed."""
    wrapper, other = _kernel_wrapper(Kernels(), 0.0), rank == 1
    _train_kernels(wrapper, rank, range(3))
    states = _gathered(wrapper.exchange_state_dict())
    found = {}
    for name, change in {
        "shape": {"first": torch.zeros(8, 4, 3, 3)},
        "flat": {"first": torch.zeros(288)},
        "type": {"first": torch.zeros(4, 8, 3, 3, dtype=torch.float64)},
        "values": {"first": torch.ones(4, 8, 3, 3)},
    }.items():
        changed = [{**each, "memories": {**each["memories"], "residual": change}} for each in states]
        found[name] = told(lambda c=changed: wrapper.load_exchange_state_dict(c if other else states))
    found["all"] = told(lambda: wrapper.load_exchange_state_dict([{**each, "format": "other"} for each in states]))
    after = wrapper.exchange_state_dict()
    found["is as before"] = all(
        torch.equal(after["memories"]["residual"][name], values)
        for name, values in states[rank]["memories"]["residual"].items()
    )
    found["right"] = told(lambda: wrapper.load_exchange_state_dict(states))
    return found


def load_on_one_rank(rank: int, loads_first: bool, hook: bool) -> str:
    """Load on rank 0 only; rank 1 goes on, after it or before."""
    module = Kernels()
    options = {"codec": "gtopk", "profile_iterations": 9}  # so that torch averages gradients by itself
    if hook:
        sender, function = comm_hook("gtopk", "sparse(density=0.1)", module=module)
        wrapper = TorchDDP(module)
        wrapper.register_comm_hook(sender, function)
        store = sender._memory.loads._store
        state, load = sender.exchange_state_dict(), sender.load_exchange_state_dict
    else:
        wrapper = OurDDP(module, **options)
        store = wrapper._planning.memory.loads._store
        state, load = wrapper.exchange_state_dict(), wrapper.load_exchange_state_dict
    states, keys = _gathered(state), store.num_keys()
    dist.barrier()
    if loads_first != (rank == 0):
        while store.num_keys() <= keys:  # until the other one has said something
            time.sleep(0.01)
    return told(lambda: load(states) if rank == 0 else wrapper(_kernel_inputs(rank, 0)).backward())
