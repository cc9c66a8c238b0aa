"""What each process of a test does whose ranks must end alike: all raise the same, or all go on the same."""

import contextlib
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


def nan_on_hosts(rank: int, hosts: str, on_nonfinite: str) -> Any:
    """Have NaN on the last rank, which leads no host; return what was raised, or which steps were taken."""
    places.network_namespace = lambda: ord(hosts[rank])
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


def scale_down(rank: int, codec: str, tells: bool) -> Any:
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
