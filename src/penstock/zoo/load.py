"""From what a user types to a `Task`: a name of the zoo, or `package.module:function`."""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ProfileError
from penstock.torch.profile import tensors_in
from penstock.zoo import find_task
from penstock.zoo.task import Task


def load_task(name: str, input_shape: tuple[int, ...] = ()) -> Task:
    """Return the task of that name or import path.

    The function may return a `Task`, or a bare module, which is fed random tensors of `input_shape` (without the
    batch) and trained to make the mean of what it returns small.
    """
    if ":" not in name:
        if input_shape:
            raise ProfileError(f"an input shape was given for {name!r}; models of the zoo have their own")
        return find_task(name)
    made = _import(name)()
    if isinstance(made, nn.Module):
        return module_task(made, name, input_shape)
    if not isinstance(made, Task):
        raise ProfileError(f"{name} returned {type(made).__name__}; wanted a penstock.zoo.Task or a torch.nn.Module")
    if input_shape:
        raise ProfileError(f"an input shape was given, but {name} returned a Task, which makes its own batches")
    return made


def _import(path: str) -> Any:
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _broken(path, error) from error  # the user's module is there, and misses something itself
        raise ProfileError(f"{path}: no module is called {error.name!r}; wanted package.module:function") from None
    except ValueError:  # an empty name, or a relative one
        raise ProfileError(f"{path}: {module_name!r} cannot be imported; wanted package.module:function") from None
    except Exception as error:  # whatever the user's module does wrong
        raise _broken(path, error) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ProfileError(f"{path}: {module_name} has no function {function_name!r}; wanted package.module:function")
    return function


def _broken(path: str, error: Exception) -> ProfileError:
    module = path.partition(":")[0]
    why = f"{type(error).__name__}: {error}"
    return ProfileError(f"{path}: {module} cannot be imported: {why}; `python -c 'import {module}'` shows where")


def module_task(module: nn.Module, name: str, input_shape: tuple[int, ...]) -> Task:
    """Return a task that runs `module` on random tensors; its loss is the mean of its outputs."""
    if not input_shape:
        raise ProfileError(f"{name} returned a bare module; wanted --input-shape too, without the batch: 3,224,224")

    def make_batch(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, *input_shape, device=device), torch.empty(0, device=device)

    sample = f"a tensor of {' x '.join(map(str, input_shape))}"
    return Task(type(module).__name__, 32, sample, lambda: module, make_batch, mean_of_outputs)


def mean_of_outputs(outputs: Any, targets: Tensor) -> Tensor:
    """Return the sum of the means of every tensor in `outputs` that has a gradient."""
    return torch.stack(list(_means(outputs))).sum()


def _means(outputs: Any) -> Iterator[Tensor]:
    for tensor in tensors_in(outputs):
        if tensor.requires_grad:
            yield tensor.mean()
