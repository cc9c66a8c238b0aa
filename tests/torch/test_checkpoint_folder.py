"""Checkpoints of a script: whole, the same for any number of ranks, and refused by all ranks where a bit differs."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import PenstockError
from penstock.torch import Checkpoints, DistributedDataParallel
from spawn import spawn


def make(codec: str = "onebit") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(6, 3), codec=codec, measurements=False, measure_seconds=0.1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def owed(model: Any) -> dict[str, np.ndarray]:
    found = model.exchange_state_dict()["memories"]["residual"]
    return {name: value.double().numpy() for name, value in found.items()}


def train_and_save(rank: int, folder: str) -> dict[str, Any]:
    """Owe something that differs between ranks, and save."""
    model, optimizer = make()
    memory = model.exchange_memory
    memory.residuals.bucket(["weight"], [18])[:] = np.arange(18) * (rank + 1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    Checkpoints(folder, model, optimizer=optimizer).save(7)
    return {"owed": owed(model), "weights": model.module.weight.tolist(), "moments": moments(optimizer)}


def load(rank: int, folder: str) -> dict[str, Any] | str:
    model, optimizer = make()
    assert Checkpoints(f"{folder}/none", model, optimizer=optimizer).load() == 0
    try:
        step = Checkpoints(folder, model, optimizer=optimizer).load()
    except PenstockError as error:
        return str(error)
    found = {"owed": owed(model), "weights": model.module.weight.tolist(), "moments": moments(optimizer)}
    return found | {"step": step}


def moments(optimizer: Any) -> list[float]:
    return [float(each["exp_avg_sq"].sum()) for each in optimizer.state_dict()["state"].values()]


def total(ranks: list[Any]) -> np.ndarray:
    return sum(next(iter(each["owed"].values()), np.zeros((3, 6))).reshape(3, 6) for each in ranks)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, spawn(2, train_and_save, str(folder))


def test_another_number_of_ranks_goes_on_with_all_that_was_owed(saved) -> None:
    folder, before = saved
    after = spawn(3, load, str(folder))
    assert total(before).any()
    np.testing.assert_array_equal(total(after), total(before))
    for each in after:
        assert (each["step"], each["weights"], each["moments"]) == (7, before[0]["weights"], before[0]["moments"])


def test_a_changed_bit_is_refused_by_all_ranks_in_a_line_that_names_the_file(saved) -> None:
    file = saved[0] / "step-00000007" / "rank-1.state"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    said = spawn(2, load, str(saved[0]))
    file.write_bytes(whole)
    assert said[0] == said[1]
    assert str(file) in said[0]


def damage(file: Path) -> None:
    """Change one bit."""
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def go_back(rank: int, folder: str) -> dict[str, Any]:
    """Save at two steps; load, then damage the newer and load again, with a step and without one."""
    model, optimizer = make()
    checkpoints = Checkpoints(folder, model, optimizer=optimizer)
    for step in (7, 9):
        with torch.no_grad():
            model.module.weight.fill_(step)
        checkpoints.save(step)

    def try_load(step: int | None = None) -> Any:
        try:
            return checkpoints.load(step), model.module.weight.mean().item()
        except PenstockError as error:
            return str(error)

    found = {"newest": try_load(), "by step": try_load(7), "missing": try_load(8)}
    if rank == 0:
        damage(Path(folder) / "step-00000009" / "model.state")
    torch.distributed.barrier()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found |= {"damaged": try_load(), "damaged by step": try_load(9)}
    return found | {"warned": [str(each.message) for each in warned if "step-" in str(each.message)]}


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_loaded(tmp_path: Path) -> None:
    ranks = spawn(2, go_back, str(tmp_path))
    for found in ranks:
        assert [found[key] for key in ("newest", "by step", "damaged")] == [(9, 9.0), (7, 7.0), (7, 7.0)]
        assert found["missing"].endswith(f"a checkpoint after step 8 in {tmp_path}; those there: 7, 9")
        assert "step-00000009/model.state: file: found" in found["damaged by step"]
    assert [len(found["warned"]) for found in ranks] == [1, 0]
    assert ranks[0]["warned"][0].endswith("going on from step-00000007, the one before")


class Wider(torch.nn.Linear):
    """A model with a buffer more."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("scale", torch.ones(1))


def one_group_each(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [each]} for each in parameters], lr=0.5)


ADAMW, SAME = (lambda parameters: torch.optim.AdamW(parameters, lr=0.5)), (lambda: torch.nn.Linear(6, 3))
OTHERS: dict[str, Any] = {  # model, optimizer, what is said of a checkpoint of `make`
    "a shape": (lambda: torch.nn.Linear(6, 4), ADAMW, "model: found 'bias of shape (3,) (2 differ)'; wanted bias of"),
    "a layer": (lambda: torch.nn.Sequential(SAME()), ADAMW, "wanted 0.bias of shape (3,), as this run's model has it"),
    "a buffer": (Wider, ADAMW, "model: found 'scale is not there'; wanted scale of shape (1,)"),
    "SGD": (SAME, lambda parameters: torch.optim.SGD(parameters, lr=0.5), "optimizer: found '2 parameters with amsg"),
    "groups": (SAME, one_group_each, "optimizer: found '2 parameters with amsgrad"),
}


def load_into_others(rank: int, folder: str) -> dict[str, tuple[str, bool]]:
    """Load a checkpoint of `make` into something else; say what was raised, and whether all is as before."""
    found = {}
    for name, (make_module, make_optimizer, _) in OTHERS.items():
        module = make_module()
        model = DistributedDataParallel(module, codec="onebit", measurements=False, measure_seconds=0.1)
        optimizer = make_optimizer(model.parameters())
        before = {each: value.clone() for each, value in module.state_dict().items()}
        with pytest.raises(PenstockError) as raised:
            Checkpoints(folder, model, optimizer=optimizer).load()
        same = all(torch.equal(value, before[each]) for each, value in module.state_dict().items())
        same = same and optimizer.param_groups[0]["lr"] == 0.5 and not optimizer.state and not owed(model)
        found[name] = str(raised.value), same
    return found


def test_the_state_of_another_model_or_optimizer_is_refused_before_anything_is_loaded(saved) -> None:
    for found in spawn(2, load_into_others, str(saved[0])):
        for name, (said, unchanged) in found.items():
            assert OTHERS[name][2] in said
            assert "\n" not in said
            assert unchanged
