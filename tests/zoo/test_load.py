"""What a user types after `--task` or as MODEL, and what is said when it cannot be used."""

import sys

import pytest

torch = pytest.importorskip("torch", reason="the zoo is made of torch modules")
from torch import nn  # noqa: E402

from penstock.errors import TaskError  # noqa: E402
from penstock.task_names import TASK_FUNCTION as FUNCTION  # noqa: E402
from penstock.zoo import Shard, find_task  # noqa: E402

USERS = """
from torch import nn
from penstock.zoo.image_models import resnet20

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x), {"detached": x}

task = resnet20
def number(): return 3
text = "not a function"
def fails(): raise ValueError("no data\\nhere")
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_models.py").write_text(USERS)
    (tmp_path / "users_broken.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("users_models", "users_broken"):
        sys.modules.pop(name, None)


def test_a_name_of_the_zoo():
    assert find_task("ResNet-20").name == "ResNet-20"


@pytest.mark.parametrize("where", ["users_models", "FOLDER/users_models.py"])
def test_a_function_is_named_by_its_module_or_by_its_file(users_module, where):
    assert find_task(f"{where}:task".replace("FOLDER", str(users_module))).name == "ResNet-20"


@pytest.mark.usefixtures("users_module")
def test_a_bare_module_is_trained_on_random_tensors_of_the_shape_given():
    task = find_task("users_models:Pair", (5, 3))
    batch = next(task.batches(Shard(0, 1, 4, seed=1), 0))
    assert batch[0].shape == (4, 5, 3)
    model = task.model()
    assert isinstance(model, nn.Module)
    assert task.loss(model, batch) == model(batch[0])[0].mean()
    assert (task.name, task.sample) == ("Pair", "a tensor of 5 x 3")


@pytest.mark.usefixtures("users_module")
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet51", (), "no task called 'resnet51'; wanted one of chars, chars_gpt, digits, bert_base, "),
        ("resnet20", (3, 32, 32), "an input shape was given for resnet20, which is a Task and makes its own batches"),
        ("users_models:task", (3,), "an input shape was given for users_models:task, which is a Task and makes its"),
        ("users_models:Pair", (), "users_models:Pair returned a bare module; wanted a penstock.zoo.Task, or where"),
        ("users_models:number", (), "users_models:number returned int without name, metric_name, batch, samples, mod"),
        ("users_models:text", (), f"users_models:text: users_models has no function 'text'; wanted {FUNCTION}"),
        ("users_models:", (), f"users_models:: users_models has no function ''; wanted {FUNCTION}"),
        ("no_such.thing:f", (), f"no_such.thing:f: no module is called 'no_such'; wanted {FUNCTION}"),
        ("no_such.py:f", (), f"no_such.py:f: there is no file 'no_such.py'; wanted {FUNCTION}"),
        ("users_models:fails", (), "users_models:fails raised ValueError: no data here (users_models.py, line 15)"),
        ("users_models.py", (), "no task called 'users_models.py'; wanted users_models.py:FUNCTION, one that returns"),
        (":f", (), f":f: '' cannot be imported; wanted {FUNCTION}"),
    ],
)
def test_what_cannot_be_used_is_explained(name, shape, message):
    with pytest.raises(TaskError) as caught:
        find_task(name, shape)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("where", "shown"), [("users_broken", "-c 'import"), ("FOLDER/users_broken.py", "")])
def test_an_import_error_inside_the_users_module_is_told_as_it_is(users_module, where, shown):
    message = f"ModuleNotFoundError: No module named 'surely_not_installed'; `python {shown}"
    with pytest.raises(TaskError, match=message):
        find_task(f"{where}:f".replace("FOLDER", str(users_module)))
