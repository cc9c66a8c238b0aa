"""What torch's ranks must have in common, as text: options of the wrapper, and a line for each parameter.

One that looks for unused parameters sends a message more, one with another text of a codec decodes to other values. So
all of it is compared in the constructor, before torch's wrapper is made (`planning/inputs.py`).
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from penstock.errors import PlanError
from penstock.planning.inputs import compare_models
from penstock.torch.collective_errors import GroupRanks

_OWN = (
    "self",
    "module",
    "device_ids",
    "output_device",
    "process_group",
    "device_mesh",
)  # which each rank has its own of


def require_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a process group, the default one where none is named; refuse where there is none yet."""
    found = group or dist.group.WORLD
    if found is None:
        raise PlanError("no process group; call torch.distributed.init_process_group first")
    return found


def compare_ranks(options: Mapping[str, str], module: torch.nn.Module | None, group: dist.ProcessGroup | None) -> str:
    """Raise the same on every rank unless all were given the same options and models of the same parameters.

    Every rank must call this. `options` are what changes what is sent, as text. Returns a name for this call that all
    ranks share and no other call has.
    """
    return compare_models(options, [] if module is None else tensors_of(module), GroupRanks(group))


def torch_options(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return what torch's wrapper is made with, as text: all that ranks must share, defaults too."""
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    return {name: _as_text(arguments.get(name, known[name].default)) for name in known if name not in _OWN}


def _as_text(value: Any) -> str:
    """Return a value as text that is the same on every rank: of parameters their names, of a hook that there is one."""
    if isinstance(value, list | tuple):
        return repr([each[0] if isinstance(each, tuple) else each for each in value])
    return "a parameter" if isinstance(value, torch.Tensor) else "a function" if callable(value) else repr(value)


def tensors_of(module: torch.nn.Module) -> list[str]:
    """Return a line for each parameter that torch's wrapper averages or copies from rank 0, in order."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [f"{name!r}, {_described(each)}" for name, each in module.named_parameters() if name not in ignored]


def _described(parameter: torch.nn.Parameter) -> str:
    if is_lazy(parameter):  # torch refuses it
        return "which has no shape yet"
    trained = "" if parameter.requires_grad else ", not trained"
    return f"{tuple(parameter.shape)} of {parameter.dtype} with strides {parameter.stride()}{trained}"
