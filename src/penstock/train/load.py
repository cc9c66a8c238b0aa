"""From what a user types after `--task` to a `Task`: a name, or `FILE.py:function`."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from penstock.errors import TrainError
from penstock.train.chars import Chars
from penstock.train.digits import Digits
from penstock.train.task import Task

TASKS: dict[str, Callable[[], Task]] = {"chars": Chars, "digits": Digits}
_MEMBERS = ("name", "metric_name", "batch", "samples", "model", "optimizer", "batches", "loss", "evaluate")


def find_task(name: str) -> Task:
    """Return the task of that name, or what the function of that file returns."""
    if name in TASKS:
        return TASKS[name]()
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise TrainError(f"no task called {name!r}; wanted one of {', '.join(TASKS)}, or FILE.py:function")
    found = getattr(_import_file(Path(file)), function, None)
    if not callable(found):
        raise TrainError(f"{file} has no function {function!r}; wanted FILE.py:function")
    task = found()
    if missing := [member for member in _MEMBERS if not hasattr(task, member)]:
        raise TrainError(
            f"{name} returned {type(task).__name__} without {', '.join(missing)}; wanted a penstock.train.task.Task"
        )
    made: Task = task
    return made


def _import_file(path: Path) -> ModuleType:
    """Import a file by its path; what stands beside it can be imported too, as in a script."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise TrainError(f"{path}: no such file; wanted FILE.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file does wrong
        del sys.modules[path.stem]
        why = f"{type(error).__name__}: {error}"
        raise TrainError(f"{path} cannot be imported: {why}; `python {path}` shows where") from error
    return module
