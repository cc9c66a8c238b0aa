"""Checkpoints of a script: whole, the same for any number of ranks, and refused by all ranks where a bit differs."""

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
