"""Ready-made training tasks: the models of the papers and two small ones, with random data and real losses.

Nothing is downloaded. Where a trace of the same name is shipped (`penstock.traces`), the parameters have its
tensors' names and sizes. `ZOO` maps a name to a function that returns a `Task`.
"""

from collections.abc import Callable

from penstock.errors import ProfileError
from penstock.zoo.bert import bert_base, bert_large
from penstock.zoo.densenet import densenet201
from penstock.zoo.googlenet import googlenet
from penstock.zoo.gpt import gpt2, gpt_small
from penstock.zoo.lstm import lstm_ptb
from penstock.zoo.resnet import resnet20, resnet50, resnet152
from penstock.zoo.task import Task
from penstock.zoo.vgg import vgg16, vgg16_cifar, vgg19

__all__ = ["ZOO", "Task", "find_task"]

ZOO: dict[str, Callable[[], Task]] = {
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


def find_task(name: str) -> Task:
    """Return the zoo's task called `name`; `bert-base` and `BERT-base` mean `bert_base`."""
    for candidate, task in ZOO.items():
        if _spelling(candidate) == _spelling(name):
            return task()
    raise ProfileError(f"no model of the zoo is called {name!r}; wanted one of {', '.join(ZOO)}")


def _spelling(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
