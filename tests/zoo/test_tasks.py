"""Tasks on real and on random data: a part held out, the same batches whenever they are asked for."""

import itertools
import re
from pathlib import Path

import pytest
import torch

from penstock.zoo import ZOO, Shard, find_task, learning_tasks
from penstock.zoo.learning_tasks import Chars, Digits
from penstock.zoo.run_task import profile_task
from penstock.zoo.task import MEMBERS, to_device

PAGE = Path(__file__).parents[2] / "docs" / "train.md"
SHARDS = [Shard(rank, 3, 4, seed=1) for rank in range(3)]


def tasks():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    return [Chars(width=8), Digits()]


def first(task, shard, start, count):
    return list(itertools.islice(task.batches(shard, start), count))


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(flat(one), flat(other), strict=True))


def flat(batches):
    return [part for batch in batches for part in (batch if isinstance(batch, tuple) else (batch,))]


def test_batches_from_the_middle_are_those_of_the_beginning():
    for task in tasks():
        assert equal(first(task, SHARDS[1], 0, 150)[100:], first(task, SHARDS[1], 100, 50))


def test_ranks_and_seeds_get_different_batches():
    for task in tasks():
        batches = [flat(first(task, shard, 0, 1))[0] for shard in (*SHARDS, Shard(0, 3, 4, seed=2))]
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(batches, 2))


def test_an_epoch_of_digits_sees_nearly_every_digit_once():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    task = Digits()
    steps = task.samples // 12
    images = torch.cat([batch[0] for shard in SHARDS for batch in first(task, shard, 0, steps)]).flatten(1)
    known = torch.unique(learning_tasks._digits(held_out=False)[0].flatten(1), dim=0)
    assert len(images) == steps * 12 > 0.99 * task.samples
    assert len(torch.unique(images, dim=0)) > 0.99 * len(known) * len(images) / task.samples


def test_the_held_out_text_is_the_end_and_is_never_trained_on():
    text, held_out = learning_tasks._split_text()
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    assert bytes(text.tolist()) + bytes(held_out.tolist()) == whole
    assert len(held_out) == pytest.approx(0.1 * len(whole), rel=0.01)


def test_parts_of_an_evaluation_add_up_to_the_whole():
    for task in tasks():
        torch.manual_seed(0)
        model = task.model().eval()
        with torch.no_grad():
            total, count = task.evaluate(model, Shard(0, 1, 4, 1))
            parts = [task.evaluate(model, shard) for shard in SHARDS]
        assert sum(part[1] for part in parts) == count
        assert sum(part[0] for part in parts) == pytest.approx(total, rel=1e-4)


def test_an_untrained_model_knows_eight_bits_per_character_and_a_trained_one_fewer():
    torch.manual_seed(0)
    task = Chars(width=32, batch=16)
    model, shard = task.model(), Shard(0, 1, 16, 1)

    def bits():
        with torch.no_grad():
            total, count = task.evaluate(model, shard)
        return total / count

    assert bits() == pytest.approx(8, abs=0.3)
    optimizer = task.optimizer(model.parameters())
    for batch in first(task, shard, 0, 30):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    assert bits() < 5.5


def test_the_example_of_the_page_is_a_task(tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    task = find_task(f"{tmp_path / 'mine.py'}:Regression")
    batch = next(task.batches(SHARDS[0], 0))
    assert task.loss(task.model(), batch).dim() == 0
    assert task.evaluate(task.model(), SHARDS[0])[1] == 64


def test_batches_of_any_form_move_to_a_device():
    moved = to_device({"a": (torch.ones(1), [torch.ones(2), "label"])}, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert moved["a"][1][1] == "label"


@pytest.mark.parametrize("name", ["resnet20", "gpt_small"])
def test_a_model_of_the_zoo_can_be_trained_on_random_batches(name):
    task = ZOO[name]()
    assert [member for member in MEMBERS if not hasattr(task, member)] == []
    assert equal(first(task, SHARDS[1], 0, 3)[2:], first(task, SHARDS[1], 2, 1))
    drawn = [flat(first(task, shard, 0, 1))[0] for shard in (*SHARDS, Shard(0, 3, 4, seed=2))]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
    model, state = task.model(), torch.random.get_rng_state()
    batch = first(task, SHARDS[0], 0, 1)[0]
    assert torch.equal(state, torch.random.get_rng_state())  # what is drawn for batches does not change the training
    total, count = task.evaluate(model, SHARDS[0])
    assert count == len(batch[0]) == 4
    optimizer, losses = task.optimizer(model.parameters()), []
    for _ in range(4):
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert total > 0


def test_a_task_with_data_of_its_own_can_be_profiled():
    trace = profile_task(Chars(width=8), batch=2, iterations=2, warmup=1).trace
    assert (trace.model, trace.batch) == ("chars", 2)
    assert {tensor.name for tensor in trace.tensors} == {name for name, _ in Chars(width=8).model().named_parameters()}


def test_the_gpt_reads_the_same_text_with_adamw_and_has_three_million_parameters():
    task = find_task("chars_gpt")
    model = task.model()
    assert 3.1e6 < sum(each.numel() for each in model.parameters()) < 3.4e6
    assert isinstance(task.optimizer(model.parameters()), torch.optim.AdamW)
    shard = Shard(rank=0, world_size=1, batch=2, seed=1)
    same = zip(task.batches(shard, 0), find_task("chars").batches(shard, 0), strict=False)
    ours, theirs = next(same)
    assert torch.equal(ours, theirs)
    assert 5 < float(task.loss(model, ours).detach()) < 6.5  # log 256 is 5.5
