"""States of an exchange dealt out to another number of ranks: nothing owed is lost, nothing twice."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FormatError, PlanError
from penstock.exchange.state import FORMAT
from penstock.torch.checkpoint import TorchMemory as Memory


def memory_of(values):
    """What one rank remembers: residuals of two parameters."""
    memory = Memory()
    memory.residuals.bucket(["a", "b"], [1, 2])[:] = values
    return memory


def states_of(ranks):
    """The states of all ranks of a run."""
    return [memory_of(values).state_dict(rank, len(ranks)) for rank, values in enumerate(ranks)]


dyadic = st.integers(-1024, 1024).map(lambda value: value / 256)
runs = st.lists(st.tuples(dyadic, dyadic, dyadic), min_size=1, max_size=6)


@given(runs, st.integers(1, 9))
def test_the_sum_of_what_ranks_owe_does_not_change_with_their_number(ranks, world_size):
    states, total = states_of(ranks), np.zeros(3)
    for rank in range(world_size):
        memory = Memory()
        memory.load_state_dicts(states[::-1], rank, world_size)
        total += memory.residuals.bucket(["a", "b"], [1, 2])
    np.testing.assert_array_equal(total, np.sum(ranks, axis=0))


@given(runs)
def test_with_as_many_ranks_everybody_gets_its_own_back(ranks):
    for rank, values in enumerate(ranks):
        memory = Memory()
        memory.load_state_dicts(states_of(ranks), rank, len(ranks))
        assert tuple(memory.residuals.bucket(["a", "b"], [1, 2])) == values


def test_a_state_goes_through_torch_save(tmp_path):
    torch.save(states_of([(1, 2, 3)])[0], tmp_path / "state.pt")
    memory = Memory()
    memory.load_state_dicts([torch.load(tmp_path / "state.pt", weights_only=True)], 0, 1)
    assert memory.residuals.bucket(["a", "b"], [1, 2]).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "states: found 'none'; wanted the state of every rank of one run, each once"),
        (states_of([(1, 2, 3)] * 3)[:2], "found 'rank 0 of 3, rank 1 of 3'; wanted the state of every rank"),
        ([states_of([(1, 2, 3)] * 2)[0]] * 2, "found 'rank 0 of 2, rank 0 of 2'"),
        ([{"format": "other"}], "format: found 'other'; wanted penstock-exchange/2"),
    ],
)
def test_states_that_are_not_one_run_are_refused(states, message):
    with pytest.raises(FormatError, match=message):
        Memory().load_state_dicts(states, 0, 1)


def state(**changes):
    """The state of the only rank of a run, whose one parameter has shape (2, 3)."""
    kept = {"residual": {"a": torch.ones(2, 3)}, "velocity": {}}
    plain = {"format": FORMAT, "rank": 0, "world_size": 1, "memories": kept, "iterations": 3, "scale": 1.0}
    return {name: value for name, value in (plain | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "penstock-exchange/1"}, "wanted penstock-exchange/2: the older one has values in memory order"),
        ({"rank": None}, "rank: found None; wanted a whole number >= 0"),
        ({"world_size": "1"}, "world_size: found '1'; wanted a whole number >= 1"),
        ({"iterations": -1}, "iterations: found -1; wanted a whole number >= 0"),
        ({"scale": 0.0}, "scale: found 0.0; wanted a finite number > 0"),
        ({"scale": None}, "scale: found None; wanted a finite number > 0"),
        ({"scale": 10**400}, "; wanted a finite number > 0"),
        ({"iterations": 10**400}, "; wanted a whole number >= 0, of 64 bits"),
        ({"memories": None}, "memories: found None; wanted tensors by kind and name of the parameter"),
        ({"memories": {"residual": [1]}}, "wanted tensors by kind and name of the parameter"),
        ({"memories": {"debt": {}}}, "memories: found 'debt'; wanted one of residual, velocity"),
        (
            {"memories": {"residual": {"b": torch.ones(2, 3)}}},
            "found 'b'; wanted a parameter of the model, such as 'a'",
        ),
        (
            {"memories": {"residual": {"a": torch.ones(6)}}},
            r"residual of 'a': found (6,); wanted (2, 3), as the parameter",
        ),
        ({"memories": {"velocity": {"a": torch.ones(3, 2)}}}, "velocity of 'a': found (3, 2); wanted (2, 3), as the"),
        (
            {"memories": {"residual": {"a": torch.ones(2, 3).half()}}},
            "of torch.float16'; wanted a tensor of torch.float32",
        ),
        ({"memories": {"residual": {"a": [1.0] * 6}}}, "wanted a tensor of torch.float32"),
        (
            {"memories": {"residual": {"a": torch.full((2, 3), torch.nan)}}},
            "found 'NaN or infinity'; wanted finite values",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_when_it_is_loaded(changes, message):
    memory = Memory()
    memory.know_parameters({"a": torch.zeros(2, 3)})
    memory.load_state_dicts([state()], 0, 1)
    with pytest.raises(FormatError, match=re.escape(message)):
        memory.load_state_dicts([state(**changes)], 0, 1)
    assert memory.residuals.bucket(["a"], [6]).tolist() == [1] * 6  # nothing was changed


@pytest.mark.parametrize("changes", [{"iterations": 4}, {"scale": 2.0}])
def test_states_of_different_moments_are_refused(changes):
    both = [state(world_size=2), state(world_size=2, rank=1, **changes)]
    with pytest.raises(FormatError, match="wanted the same on all ranks: states of one moment"):
        Memory().load_state_dicts(both, 0, 1)


def test_what_no_state_is_is_refused():
    with pytest.raises(FormatError, match="state: found None; wanted what exchange_state_dict returned"):
        Memory().load_state_dicts([None], 0, 1)


FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("saved", FORMATS)
@pytest.mark.parametrize("loaded", FORMATS)
@pytest.mark.parametrize("known_later", [False, True])
def test_a_state_has_logical_order_whatever_the_memory_format(saved, loaded, known_later):
    values = torch.arange(4 * 3 * 2 * 2, dtype=torch.float32).view(4, 3, 2, 2)
    before, after = (values.clone(memory_format=one) for one in (saved, loaded))
    memory, resumed = Memory(), Memory()
    memory.know_parameters({"a": before})
    memory.residuals.bucket(["a"], [48])[:] = before.as_strided((48,), (1,))
    kept = memory.state_dict(0, 1)
    assert torch.equal(kept["memories"]["residual"]["a"], values)
    for step in (resumed.know_parameters, resumed.load_state_dicts)[:: -1 if known_later else 1]:
        step(*(({"a": after},) if step == resumed.know_parameters else ([kept], 0, 1)))
    np.testing.assert_array_equal(resumed.residuals.bucket(["a"], [48]), after.as_strided((48,), (1,)))
    assert torch.equal(resumed.state_dict(0, 1)["memories"]["residual"]["a"], values)


def test_what_is_owed_follows_a_parameter_whose_buckets_are_made_anew():
    values = torch.arange(48, dtype=torch.float32).view(4, 3, 2, 2)
    memory = Memory(on_nonfinite="skip")
    memory.know_parameters({"a": values})
    memory.residuals.bucket(["a"], [48])[:] = values.flatten()
    memory.begin()  # saves what is owed, for a step that is skipped
    memory.know_parameters({"a": values.clone(memory_format=torch.channels_last)})
    memory.has_nonfinite = True
    assert torch.equal(memory.state_dict(0, 1)["memories"]["residual"]["a"], values)


def test_a_parameter_that_turns_out_to_have_another_shape_is_refused():
    memory = Memory()
    memory.load_state_dicts([state()], 0, 1)
    with pytest.raises(PlanError, match=re.escape("residual of 'a' has shape (2, 3), its parameter (3, 2); load the")):
        memory.know_parameters({"a": torch.zeros(3, 2)})


class Scaler:
    """A gradient scaler that says what it is told to."""

    scale = 1.0

    def get_scale(self):
        return self.scale


def test_residuals_follow_the_gradient_scaler():
    scaler = Scaler()
    memory = Memory(scaler=scaler)
    memory.begin()
    memory.residuals.bucket(["a"], [2])[:] = [1, 2]
    scaler.scale = 4.0
    memory.begin()
    assert memory.residuals.bucket(["a"], [2]).tolist() == [4, 8]


def test_a_skipped_step_leaves_what_was_owed_before_it():
    memory = Memory(on_nonfinite="skip")
    memory.residuals.bucket(["a"], [1])[:] = 3
    memory.begin()
    memory.residuals.bucket(["a"], [1])[:] = 1
    memory.has_nonfinite = True
    assert memory.state_dict(0, 1)["memories"]["residual"]["a"].tolist() == [3]
    memory.begin()
    assert memory.residuals.bucket(["a"], [1]).tolist() == [3]
