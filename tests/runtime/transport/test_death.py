"""The error of an engine that knows who died names the first before all others."""

from penstock.runtime.transport import DeathError


def test_one_dead_rank_is_named() -> None:
    assert str(DeathError([2])) == "rank 2 died"


def test_those_who_ended_later_are_told_from_the_first() -> None:
    error = DeathError([2, 0, 1])
    assert str(error) == "rank 2 died; since then rank 0, rank 1 ended too"
    assert error.ranks == (2, 0, 1)
