"""From what a user types, `--task` of `penstock train` or MODEL of `penstock profile`, to a `Task`.

That is a name of `TASKS`, `FILE.py:function` or `package.module:function`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError, TaskError, one_line
from penstock.task_names import TASK_FUNCTION, task_of_ours
from penstock.zoo.image_models import densenet201, googlenet, resnet20, resnet50, resnet152, vgg16, vgg16_cifar, vgg19
from penstock.zoo.language_models import bert_base, bert_large, gpt2, gpt_small, lstm_ptb
from penstock.zoo.learning_tasks import Chars, CharsGpt, Digits
from penstock.zoo.task import MEMBERS, RandomTask, Task

ZOO: dict[str, Callable[[], RandomTask]] = {
    "bert_base": bert_base,
    "bert_large": bert_large,
    "densenet201": densenet201,
    "googlenet": googlenet,
    "gpt2": gpt2,
    "gpt_small": gpt_small,
    "lstm_ptb": lstm_ptb,
    "resnet20": resnet20,
    "resnet50": resnet50,
    "resnet152": resnet152,
    "vgg16": vgg16,
    "vgg16_cifar": vgg16_cifar,
    "vgg19": vgg19,
}
TASKS: dict[str, Callable[[], Task]] = {"chars": Chars, "chars_gpt": CharsGpt, "digits": Digits, **ZOO}


def find_task(name: str, input_shape: tuple[int, ...] = ()) -> Task:
    """Return the task of that name, or what a user's function returns; `BERT-base` means `bert_base`.

    The function may return a bare module where `input_shape` (of one sample) is given: it is fed random tensors and
    trained to make the mean of what it returns small.
    """
    ours = task_of_ours(name)
    made: Any = TASKS[ours]() if ours else _call(name)
    if isinstance(made, nn.Module):
        return module_task(made, name, input_shape)
    if missing := [member for member in MEMBERS if not hasattr(made, member)]:
        lacks = f"{type(made).__name__} without {', '.join(missing)}"
        raise TaskError(f"{name} returned {lacks}; wanted a penstock.zoo.Task or a torch.nn.Module")
    if input_shape:
        raise TaskError(f"an input shape was given for {name}, which is a Task and makes its own batches; leave it out")
    task: Task = made
    return task


def _call(name: str) -> Any:
    """Import the module or the file before the last colon, and call the function after it."""
    where, _, function = name.rpartition(":")
    module = _import_file(name, Path(where)) if where.endswith(".py") else _import_module(name, where)
    found = getattr(module, function, None)
    if not callable(found):
        raise TaskError(f"{name}: {where} has no function {function!r}; wanted {TASK_FUNCTION}")
    with explained(name):
        return found()


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Around a user's code: say in one line what it raised, and in which line of theirs."""
    try:
        yield
    except (PenstockError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever it does wrong
        frames = [frame for frame in extract_tb(error.__traceback__) if not _is_installed(frame.filename)]
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        raise TaskError(f"{name} raised {type(error).__name__}: {one_line(error)}{where}") from error


def _is_installed(file: str) -> bool:
    parts = Path(file).parts
    return file.startswith("<") or "site-packages" in parts or Path(file).is_relative_to(Path(__file__).parents[1])


def _import_module(name: str, module: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module in the working directory, as `python -m` finds it
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _broken(module, f"-c 'import {module}'", error) from error  # it is there, and misses something itself
        raise TaskError(f"{name}: no module is called {error.name!r}; wanted {TASK_FUNCTION}") from None
    except ValueError:  # an empty name, or a relative one
        raise TaskError(f"{name}: {module!r} cannot be imported; wanted {TASK_FUNCTION}") from None
    except Exception as error:  # whatever the user's module does wrong
        raise _broken(module, f"-c 'import {module}'", error) from error


def _import_file(name: str, path: Path) -> ModuleType:
    """Import a file by its path; what stands beside it can be imported too, as in a script."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise TaskError(f"{name}: there is no file {str(path)!r}; wanted {TASK_FUNCTION}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file does wrong
        del sys.modules[path.stem]
        raise _broken(str(path), str(path), error) from error
    return module


def _broken(where: str, shown_by: str, error: Exception) -> TaskError:
    why = f"{type(error).__name__}: {error}"
    return TaskError(f"{where} cannot be imported: {why}; `python {shown_by}` shows where")


def module_task(module: nn.Module, name: str, input_shape: tuple[int, ...]) -> RandomTask:
    """Return a task that runs `module` on random tensors; its loss is the mean of its outputs."""
    if not input_shape:
        wanted = "a penstock.zoo.Task, or where a verb takes it --input-shape, without the batch: 3,224,224"
        raise TaskError(f"{name} returned a bare module; wanted {wanted}")

    def make_batch(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, *input_shape, device=device), torch.empty(0, device=device)

    sample = f"a tensor of {' x '.join(map(str, input_shape))}"
    return RandomTask(type(module).__name__, 32, sample, lambda: module, make_batch, mean_of_outputs)


def mean_of_outputs(outputs: Any, targets: Tensor) -> Tensor:
    """Return the sum of the means of every tensor in `outputs` that has a gradient."""
    return torch.stack(list(_means(outputs))).sum()


def _means(outputs: Any) -> Iterator[Tensor]:
    from penstock.torch.profile import tensors_in  # not before: it brings the wrapper with it

    for tensor in tensors_in(outputs):
        if tensor.requires_grad:
            yield tensor.mean()
