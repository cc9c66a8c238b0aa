"""The zoo against published sizes, the shipped traces, and what training must do: lower the loss."""

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the zoo is made of torch modules")

from architectures import ARCHITECTURES  # noqa: E402
from penstock.errors import TaskError  # noqa: E402
from penstock.traces import load_shipped, shipped  # noqa: E402
from penstock.zoo import ZOO, RandomTask, find_task  # noqa: E402

CPU, META = torch.device("cpu"), torch.device("meta")
SMALL = {"resnet20", "vgg16_cifar", "gpt_small"}


def sizes(name):
    with META:
        return {name: parameter.numel() for name, parameter in ZOO[name]().build().named_parameters()}


def train(task, steps, batch, rate=0.05):
    """Return the losses of plain SGD on one batch."""
    torch.manual_seed(1)
    model = task.build()
    inputs, targets = task.make_batch(batch, CPU)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task.compare(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_resnet20_has_the_parameters_he_et_al_count():
    assert sum(sizes("resnet20").values()) == 269_722  # "0.27M" of their Table 6
    assert (
        len(sizes("resnet20")) == 3 * 19 + 2
    )  # 19 convolutions with two tensors of normalisation each; the last layer


def test_vgg16_for_cifar_has_15_3_million_parameters():
    convolutions = sum(
        9 * a * b + b
        for a, b in zip(
            (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512),
            (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512),
            strict=True,
        )
    )
    normalisations = 2 * (2 * 64 + 2 * 128 + 3 * 256 + 6 * 512)
    classifier = 2 * (512 * 512 + 512) + 512 * 10 + 10
    total = sum(sizes("vgg16_cifar").values())
    assert total == convolutions + normalisations + classifier
    assert round(total / 1e6, 1) == 15.3


def test_the_small_gpt_counts_its_shared_table_once():
    block = 12 * 128 * 128 + 13 * 128
    assert sum(sizes("gpt_small").values()) == 256 * 128 + 128 * 128 + 4 * block + 2 * 128


@pytest.mark.parametrize("name", shipped())
def test_parameters_are_the_tensors_of_the_shipped_trace(name):
    assert {tensor.name: tensor.numel for tensor in load_shipped(name).tensors} == sizes(name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_task_describes_itself_as_its_architecture_does(name):
    task, architecture = ZOO[name](), ARCHITECTURES[name]
    assert (task.name, task.batch, task.sample) == (architecture.model, architecture.batch, architecture.sample)


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_gets_a_gradient_from_a_scalar_loss(name):
    task = ZOO[name]()
    with META:
        model, (inputs, targets) = task.build(), task.make_batch(2, META)
        loss = task.compare(model(inputs), targets)
        loss.backward()
    assert loss.shape == ()
    assert len(inputs) == len(targets) == 2
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize(("name", "rate"), [("resnet20", 0.02), ("vgg16_cifar", 0.02), ("gpt_small", 0.1)])
def test_training_on_one_batch_lowers_the_loss(name, rate):
    losses = train(ZOO[name](), steps=8, batch=4, rate=rate)
    assert min(losses[-3:]) < 0.9 * losses[0]


@pytest.mark.slow
@pytest.mark.timeout(600)  # GPT-2 on a busy core
@pytest.mark.parametrize("name", sorted(ZOO.keys() - SMALL))
def test_a_fresh_model_is_neither_dead_nor_exploding(name):
    losses = train(ZOO[name](), steps=1, batch=1 if name == "gpt2" else 2, rate=1e-4)
    assert all(math.isfinite(loss) and 0 < loss < 30 for loss in losses), losses


def test_a_fresh_language_model_knows_nothing():
    task = ZOO["gpt_small"]()
    assert train(task, steps=1, batch=4)[0] == pytest.approx(math.log(256), rel=0.02)


def test_a_word_does_not_see_the_words_after_it():
    torch.manual_seed(0)
    task = ZOO["gpt_small"]()
    model = task.build().eval()
    words, _ = task.make_batch(1, CPU)
    changed = words.clone()
    changed[0, 64:] = (changed[0, 64:] + 1) % 256
    before, after = model(words), model(changed)
    assert torch.equal(before[0, :64], after[0, :64])
    assert not torch.allclose(before[0, 64:], after[0, 64:])


def test_googlenets_auxiliary_classifiers_count_three_tenths_each_and_only_while_training():
    task = ZOO["googlenet"]()
    with META:
        model, (images, _) = task.build(), task.make_batch(1, META)
        assert len(model(images)) == 3
        assert len(model.eval()(images)) == 1
    logits, targets = [torch.tensor([[0.0, 0.0]])] * 3, torch.tensor([0])
    assert task.compare(logits, targets).item() == pytest.approx(1.6 * math.log(2))


@pytest.mark.parametrize("spelling", ["bert_base", "bert-base", "BERT-base"])
def test_hyphens_underscores_and_case_do_not_matter(spelling):
    assert find_task(spelling).name == "BERT-base"


def test_an_unknown_model_is_one_line_that_lists_the_zoo():
    with pytest.raises(TaskError, match="no task called 'resnet51'; wanted one of chars, chars_gpt, digits, "):
        find_task("resnet51")


def test_tasks_are_values():
    with pytest.raises(AttributeError):
        ZOO["resnet20"]().batch = 3
    assert isinstance(ZOO["resnet20"](), RandomTask)


def test_the_documented_table_is_what_the_zoo_builds():
    text = (Path(__file__).parents[2] / "docs" / "profile.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| `" in line[:4]]
    documented = {row[0].strip("`"): row[2:5] for row in rows}
    built = {name: sizes(name) for name in ZOO}
    expected = {n: [f"{sum(s.values()):,}", str(len(s)), str(ZOO[n]().batch)] for n, s in built.items()}
    assert documented == expected
