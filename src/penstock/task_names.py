"""The names of the tasks that come with penstock, known without importing torch, which takes seconds."""

from penstock.errors import TaskError, did_you_mean

TASK_NAMES = (
    "chars", "chars_gpt", "digits",
    "bert_base", "bert_large", "densenet201", "googlenet", "gpt2", "gpt_small", "lstm_ptb",
    "resnet20", "resnet50", "resnet152", "vgg16", "vgg16_cifar", "vgg19",
)  # fmt: skip
TASK_FUNCTION = "FILE.py:function or package.module:function"  # how users name a task of theirs


def task_of_ours(text: str) -> str:
    """Return which task of ours is meant, "" for a user's function; refuse a name that no task has.

    >>> task_of_ours("ResNet-20"), task_of_ours("train.py:task")
    ('resnet20', '')
    """
    if is_users(text):
        return ""
    for name in TASK_NAMES:
        if spelling(name) == spelling(text):
            return name
    if text.endswith(".py"):
        raise TaskError(f"no task called {text!r}; wanted {text}:FUNCTION, one that returns a task or a module")
    near = did_you_mean(text, TASK_NAMES)
    raise TaskError(f"no task called {text!r}; wanted one of {', '.join(TASK_NAMES)}, {TASK_FUNCTION}{near}")


def is_users(text: str) -> bool:
    """Say whether a task is a user's function and none of ours."""
    return ":" in text


def spelling(text: str) -> str:
    """Return a name as it is compared: `BERT-base` and `bert_base` are one."""
    return text.lower().replace("-", "").replace("_", "")
