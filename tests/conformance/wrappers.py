"""The wrappers that are compared: torch's own, and ours with a plan from the first iteration on."""

from typing import Any

import torch
import torch.distributed as dist

from penstock.plan import Bucket, Plan
from penstock.torch import DistributedDataParallel


def wrapper_class(flavour: str, buckets: int = 2) -> type[torch.nn.parallel.DistributedDataParallel]:
    """Return what stands in the place of torch's class; ours is named by the strategy that carries all buckets."""
    Planned.buckets = buckets
    return {"stock": torch.nn.parallel.DistributedDataParallel, "native": Native, "ring": Ring}[flavour]


class Planned(DistributedDataParallel):
    """Ours, given a plan as soon as it is made."""

    strategy = ""
    buckets = 2  # of the plan

    def __init__(self, module: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        plan = plan_of(module, self.strategy, Planned.buckets, _workers(options))
        super().__init__(module, *arguments, plan=plan, **options)


class Native(Planned):
    """Buckets travel by torch's all-reduce."""

    strategy = "native"


class Ring(Planned):
    """Buckets travel by our ring."""

    strategy = "ring"


def plan_of(module: torch.nn.Module, strategy: str, buckets: int, workers: int) -> Plan | None:
    """Return a plan for all that is trained, in the opposite order of its registration; None for nothing."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    sizes = {
        name: parameter.numel() * parameter.element_size()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }
    names = list(reversed(sizes))
    most = -(-len(names) // buckets)
    parts = [tuple(names[start : start + most]) for start in range(0, len(names), most or 1)]
    planned = tuple(Bucket(part, sum(sizes[name] for name in part), strategy) for part in parts)
    return Plan("conformance", workers, "conformance", planned) if planned else None


def _workers(options: dict[str, Any]) -> int:
    if (mesh := options.get("device_mesh")) is not None:
        return int(mesh.size())
    return dist.get_world_size(options.get("process_group"))
