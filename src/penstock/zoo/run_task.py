"""Running a task: its training step, and its profile."""

from collections.abc import Callable

import torch
from torch import nn

from penstock.errors import ProfileError
from penstock.torch.profile import Profile, profile_backward
from penstock.zoo.load import explained
from penstock.zoo.task import RandomTask, Task, first_batch

AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16}  # gradients are float32 either way


def build(task: Task, device: torch.device) -> nn.Module:
    """Return the task's model on `device`, where its weights are drawn too: on a GPU that is much sooner done."""
    with device, explained(task.name):
        return task.model().to(device)


def training_step(
    task: Task, model: nn.Module, batch: int, device: torch.device, autocast: torch.dtype | None = None
) -> Callable[[], None]:
    """Return a function that runs one forward and backward pass on the same batch each time."""
    with explained(task.name):
        data = first_batch(task, batch, device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        cast = torch.autocast(device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None)
        with explained(task.name), cast:
            loss = task.loss(model, data)
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def profile_task(
    task: Task,
    *,
    device: str = "cpu",
    batch: int = 0,
    dtype: str = "float32",
    iterations: int = 20,
    warmup: int = 5,
    source: str = "penstock profile",
    on_step: Callable[[], object] = lambda: None,
) -> Profile:
    """Build the task's model on `device` and profile it; `batch` 0 is the task's own, bfloat16 means autocast."""
    if dtype not in AUTOCAST:
        raise ProfileError(f"dtype {dtype!r}; wanted one of {', '.join(AUTOCAST)}")
    where, batch = find_device(device), batch or task.batch
    try:
        model = build(task, where)
        return profile_backward(
            model,
            training_step(task, model, batch, where, AUTOCAST[dtype]),
            iterations=iterations,
            warmup=warmup,
            name=task.name,
            batch=batch,
            source=f"{source}: {_conditions(where, dtype)}{_sample(task)}",
            on_step=on_step,
        )
    except torch.OutOfMemoryError as error:
        message = f"{task.name} with batch {batch} needs more memory than {device} has; choose a smaller batch"
        raise ProfileError(message) from error


def _sample(task: Task) -> str:
    return f", a sample is {task.sample}" if isinstance(task, RandomTask) else ""


def _conditions(device: torch.device, dtype: str) -> str:
    """Return what the times depend on besides the device: torch's version and how it multiplies."""
    precision = "bfloat16 autocast" if dtype == "bfloat16" else "float32"
    if device.type == "cuda" and dtype == "float32":
        settings = {"convolutions": torch.backends.cudnn.allow_tf32, "products": torch.backends.cuda.matmul.allow_tf32}
        tf32 = [name for name, allowed in settings.items() if allowed]
        precision += f" (TF32 in {' and '.join(tf32)})" if tf32 else ""
    return f"torch {torch.__version__}, {precision}"


def find_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is the first GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ProfileError(f"device {name!r}; wanted auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise ProfileError(f"device {name!r}: torch sees {torch.cuda.device_count()} GPUs here; wanted one that exists")
    return device
