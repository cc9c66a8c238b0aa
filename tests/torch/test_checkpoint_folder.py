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


def make(codec: str = "onebit", module: Any = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    own = torch.nn.Linear(6, 3) if module is None else module()
    model = DistributedDataParallel(own, codec=codec, measurements=False, measure_seconds=0.1)
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
    "a shape": (
        lambda: torch.nn.Linear(6, 4),
        ADAMW,
        "model: found 'bias of shape (3,) in float32 (2 differ)'; wanted",
    ),
    "a layer": (lambda: torch.nn.Sequential(SAME()), ADAMW, "wanted 0.bias of shape (3,) in float32, as this run's"),
    "a buffer": (Wider, ADAMW, "model: found 'scale is not there'; wanted scale of shape (1,) in float32"),
    "a type": (lambda: SAME().bfloat16(), ADAMW, "found 'bias of shape (3,) in float32 (2 differ)'; wanted bias of"),
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


def weights_and_rate(model: Any, optimizer: Any) -> tuple[Any, ...]:
    return model.module.weight.tolist(), optimizer.param_groups[0]["lr"], len(optimizer.state), len(owed(model))


class Refusing:
    """Part of a run that finds out what it cannot take only as it loads; the last of them to be loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "value" not in state_dict:
            raise KeyError("value")


def load_what_does_not_fit(rank: int, folder: str) -> list[tuple[str, bool]]:
    """Save states of which one part is wrong, load each, and say what was raised and whether all is as before."""
    found = []
    for part, wrong in WRONG:
        model, optimizer = make()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        planted = {"optimizer": Planted(optimizer.state_dict()), "other": Planted({"value": 1})}
        wrong(planted[part].state)
        Checkpoints(f"{folder}/{len(found)}", model, **planted).save(3)
        model, optimizer = make()
        with torch.no_grad():
            model.module.weight.zero_()
        optimizer.param_groups[0]["lr"] = 0.5
        before = weights_and_rate(model, optimizer)
        with pytest.raises(PenstockError) as raised:
            Checkpoints(f"{folder}/{len(found)}", model, optimizer=optimizer, other=Refusing()).load()
        found.append((str(raised.value), weights_and_rate(model, optimizer) == before))
    return found


class Planted:
    """Saves a state that is not its own."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded here")


WRONG: list[tuple[str, Any]] = [
    ("optimizer", lambda state: state["param_groups"][0].update(lr="0.1")),
    ("optimizer", lambda state: state["param_groups"][0].update(betas=(0.9, None))),
    ("optimizer", lambda state: state["state"][0].update(exp_avg=torch.ones(7))),
    ("other", lambda state: state.clear()),
]
SAID = (
    "lr: a str instead of a number",
    "betas: (a number, a flag) instead of (a number, a number)",
    "exp_avg of shape (7,) in float32, its parameter of (3, 6)",
    "state: found \"'value'\"; wanted the state of this run's other",
)


def test_whatever_does_not_fit_leaves_everything_as_it_was_on_all_ranks(tmp_path: Path) -> None:
    for found in spawn(2, load_what_does_not_fit, str(tmp_path)):
        for (said, unchanged), wanted in zip(found, SAID, strict=True):
            assert wanted in said
            assert unchanged, said


class Asserting(Refusing):
    """Refuses the state of a checkpoint as an assertion does, and takes its own back."""

    value = 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == self.state_dict(), f"a state of {state_dict['value']}"


def load_what_is_refused_last(rank: int, folder: str) -> tuple[str, bool]:
    """Save, train on and load; say what was raised, and whether the optimizer has the very tensors it had before."""
    model, optimizer = make()
    checkpoints = Checkpoints(folder, model, optimizer=optimizer, other=(other := Asserting()))
    for step in (1, 2):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        if step == 1:
            checkpoints.save(step)
    other.value = 2
    kept = [each for values in optimizer.state.values() for each in values.values()]
    before = [each.clone() for each in kept]
    with pytest.raises(PenstockError) as raised:
        checkpoints.load()
    now = [each for values in optimizer.state.values() for each in values.values()]
    same = [each.data_ptr() for each in now] == [each.data_ptr() for each in kept]
    return str(raised.value), same and all(map(torch.equal, now, before))


def test_a_refused_load_leaves_the_optimizers_own_tensors_of_which_it_makes_no_copy(tmp_path: Path) -> None:
    for said, same in spawn(2, load_what_is_refused_last, str(tmp_path)):
        assert "state: found 'a state of 1'; wanted the state of this run's other" in said
        assert same


class Noting(torch.nn.Linear):
    """Keeps a number beside its tensors, and finds out only as it loads that it was given none."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.noted: Any = 1

    def get_extra_state(self) -> dict[str, Any]:
        return {"noted": self.noted}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.noted = None
        noted = state.pop("noted")
        if isinstance(noted, str):
            raise ValueError(f"noted {noted}")
        self.noted = noted


def load_extra_states(rank: int, folder: str) -> list[tuple[str, Any, bool]]:
    """Save an extra state that fits and one that does not, load each, and say what was raised and what is there."""
    found = []
    for noted in (2, "two"):
        model, optimizer = make(module=Noting)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        model.module.noted = noted
        Checkpoints(f"{folder}/{noted}", model, optimizer=optimizer).save(3)
        model, optimizer = make(module=Noting)
        with torch.no_grad():
            model.module.weight.zero_()
        optimizer.param_groups[0]["lr"] = 0.5
        before, said = weights_and_rate(model, optimizer), ""
        try:
            Checkpoints(f"{folder}/{noted}", model, optimizer=optimizer).load()
        except PenstockError as error:
            said = str(error)
        found.append((said, model.module.noted, weights_and_rate(model, optimizer) == before))
    return found


def test_an_extra_state_that_a_module_refuses_leaves_everything_as_it_was(tmp_path: Path) -> None:
    for fits, (said, noted, unchanged) in spawn(2, load_extra_states, str(tmp_path)):
        assert fits == ("", 2, False)
        assert "found 'noted two'; wanted the state of this run's model" in said
        assert (noted, unchanged) == (1, True)
