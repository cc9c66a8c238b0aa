"""States of an exchange dealt out to another number of ranks: nothing owed is lost, nothing twice."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FormatError
from penstock.torch.memory import Memory


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
        ([{"format": "other"}], "format: found 'other'; wanted penstock-exchange/1"),
    ],
)
def test_states_that_are_not_one_run_are_refused(states, message):
    with pytest.raises(FormatError, match=message):
        Memory().load_state_dicts(states, 0, 1)


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
    memory.spoilt = True
    assert memory.state_dict(0, 1)["memories"]["residual"]["a"].tolist() == [3]
    memory.begin()
    assert memory.residuals.bucket(["a"], [1]).tolist() == [3]
