"""The recipe for ranks that come and go, `examples/train_elastic.py`, under torchrun's elastic launch."""

import pytest

from soak import elastic


def notes(*changes: tuple[int, float]) -> list[elastic.Note]:
    """Return what ranks note in a round; `changes`: a note's number, and what one element lost there."""
    made: list[elastic.Note] = []
    for ranks, first, last in ((3, 0, 30), (2, 30, 60), (3, 60, 90)):
        made.append({"event": "load", "ranks": ranks, "step": first, "mass": float(first), "lost": 0.0})
        steps = range(first + elastic.SAVE_EVERY, last + 1, elastic.SAVE_EVERY)
        made += [{"event": "save", "ranks": ranks, "step": step, "loss": 1.0 / step} for step in steps]
    for number, lost in changes:
        made[number]["lost"] = lost
    return made


def test_a_round_is_good_where_nothing_is_lost_and_not_where_an_element_is() -> None:
    assert elastic.judge(notes(), [0, 0, 0])["good"]
    assert elastic.judge(notes((4, 2e-5)), [0, 0, 0])["good"]  # of 30 owed: rounding
    assert not elastic.judge(notes((4, 1e-3)), [0, 0, 0])["good"]
    assert not elastic.judge(notes(), [0, 1, 0])["good"]


def test_a_round_is_not_good_where_a_start_goes_back_further_than_the_newest_checkpoint() -> None:
    back = notes()
    back[4]["step"] = 10
    assert not elastic.judge(back, [0, 0, 0])["good"]
    assert not elastic.judge(notes()[:8], [0, 0, 0])["good"]  # ranks that never were three again


@pytest.mark.slow
def test_ranks_that_die_and_come_back_lose_steps_and_no_residual() -> None:
    row = elastic.run_round(1)
    assert row["good"], row
