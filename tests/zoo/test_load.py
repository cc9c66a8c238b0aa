"""What a user types as MODEL, and what is said when it cannot be used."""

import sys

import pytest

torch = pytest.importorskip("torch", reason="the zoo is made of torch modules")
from torch import nn  # noqa: E402

from penstock.errors import ProfileError  # noqa: E402
from penstock.zoo.load import load_task  # noqa: E402

USERS = """
from torch import nn
from penstock.zoo.resnet import resnet20

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x), {"detached": x}

task = resnet20
def number(): return 3
text = "not a function"
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_models.py").write_text(USERS)
    (tmp_path / "users_broken.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("users_models", "users_broken"):
        sys.modules.pop(name, None)


def test_a_name_of_the_zoo():
    assert load_task("ResNet-20").model == "ResNet-20"


@pytest.mark.usefixtures("users_module")
def test_a_function_that_returns_a_task():
    assert load_task("users_models:task").model == "ResNet-20"


@pytest.mark.usefixtures("users_module")
def test_a_bare_module_is_trained_on_random_tensors_of_the_shape_given():
    task = load_task("users_models:Pair", (5, 3))
    inputs, targets = task.make_batch(4, torch.device("cpu"))
    assert inputs.shape == (4, 5, 3)
    model = task.build()
    outputs = model(inputs)
    assert task.loss(outputs, targets) == outputs[0].mean()
    assert (task.model, task.sample) == ("Pair", "a tensor of 5 x 3")
    assert isinstance(model, nn.Module)


@pytest.mark.usefixtures("users_module")
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet51", (), "no model of the zoo is called 'resnet51'; wanted one of bert_base, "),
        ("resnet20", (3, 32, 32), "an input shape was given for 'resnet20'; models of the zoo have their own"),
        ("users_models:task", (3,), "an input shape was given, but users_models:task returned a Task, which makes"),
        ("users_models:Pair", (), "users_models:Pair returned a bare module; wanted --input-shape too, without the"),
        ("users_models:number", (), "users_models:number returned int; wanted a penstock.zoo.Task or a torch.nn.Mod"),
        ("users_models:text", (), "users_models:text: users_models has no function 'text'; wanted package.module:f"),
        ("users_models:", (), "users_models:: users_models has no function ''; wanted package.module:function"),
        ("no_such.thing:f", (), "no_such.thing:f: no module is called 'no_such'; wanted package.module:function"),
        (":f", (), ":f: '' cannot be imported; wanted package.module:function"),
    ],
)
def test_what_cannot_be_used_is_explained(name, shape, message):
    with pytest.raises(ProfileError) as caught:
        load_task(name, shape)
    assert str(caught.value).startswith(message)


@pytest.mark.usefixtures("users_module")
def test_an_import_error_inside_the_users_module_is_told_as_it_is():
    with pytest.raises(ProfileError, match="ModuleNotFoundError: No module named 'surely_not_installed'; `python -c"):
        load_task("users_broken:f")
