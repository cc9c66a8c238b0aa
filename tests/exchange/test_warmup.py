import pickle

import pytest

from penstock.errors import CodecError
from penstock.exchange.warmup import PAPER, warmup


def test_the_papers_four_epochs_come_before_the_density():
    assert [warmup("paper", 0.001)(epoch) for epoch in range(7)] == [*PAPER, 0.001, 0.001, 0.001]


@pytest.mark.parametrize(
    ("density", "wanted"), [(0.001, [4**-1, 4**-2, 4**-3, 4**-4, 0.001]), (0.25, [0.25]), (1, [1])]
)
def test_dgc_takes_a_quarter_each_time_until_the_density_is_reached(density, wanted):
    found = [warmup("dgc", density)(epoch) for epoch in range(len(wanted) + 1)]
    assert found == [*wanted, density]


def test_a_list_a_function_or_nothing():
    assert [warmup([0.5, 0.1], 0.01)(step) for step in range(4)] == [0.5, 0.1, 0.01, 0.01]
    assert [warmup(lambda step: 1 / (step + 1), 0.5)(step) for step in (0, 3)] == [1, 0.25]
    assert warmup(None, 0.005)(0) == 0.005


@pytest.mark.parametrize(
    ("spec", "density", "message"),
    [
        ("slowly", 0.1, "warm-up 'slowly'; wanted paper or dgc, a list of densities or a function"),
        ([0.5, 0], 0.1, "density 0 in a warm-up; wanted more than 0 and at most 1"),
        (None, 2, "density 2 in a warm-up"),
        (0.5, 0.1, "warm-up 0.5; wanted paper or dgc, a list of densities or a function"),
        (["a lot"], 0.1, "density 'a lot' in a warm-up; wanted more than 0 and at most 1"),
    ],
)
def test_what_makes_no_sense_is_refused(spec, density, message):
    with pytest.raises(CodecError, match=message):
        warmup(spec, density)


def test_a_functions_answers_are_checked_too():
    for answer in (-1, None):
        with pytest.raises(CodecError, match=f"density {answer} in a warm-up"):
            warmup(lambda step, answer=answer: answer, 0.1)(0)


@pytest.mark.parametrize("spec", ["paper", "dgc", [0.5], None, abs])
def test_a_schedule_can_be_pickled_as_a_wrapper_is(spec):
    schedule = warmup(spec, 0.1)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
