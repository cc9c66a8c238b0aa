"""Ranks that are in different calls are told both; nothing is asked while all goes well."""

import json
import threading
from typing import Any

import numpy as np
import pytest

from penstock.errors import TransportError
from penstock.runtime import Communicator
from penstock.runtime.failure_diagnosis import Note, began_with, diagnosis, explained
from penstock.runtime.transport.memory import Fabric, MemoryTransport
from runtime.threads import outcomes


@pytest.fixture(autouse=True)
def _half_the_timeout_for_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of a busy machine run into the same timeout at different moments."""
    monkeypatch.setattr("penstock.runtime.failure_diagnosis.SHARE", 0.5)


def calls_of(known: list[int], made: list[list[int]]) -> list[Any]:
    """Let all ranks all-reduce `known` elements, then rank r `made[r]`, call by call; return what each raised."""
    together = threading.Barrier(len(made))

    def rank(transport: MemoryTransport) -> None:
        communicator = Communicator(transport)
        for numel in known:
            communicator.all_reduce(np.ones(numel, np.float32))
        together.wait(60)
        communicator.timeout_seconds = 2.0
        for numel in made[transport.rank]:
            communicator.all_reduce(np.ones(numel, np.float32))

    return outcomes(len(made), rank)


def test_both_calls_are_named_by_every_rank_that_waits() -> None:
    errors = calls_of([5, 7], [[5], [7], [5]])
    for rank, error in enumerate(errors):
        assert isinstance(error, TransportError)
        mine, theirs = (7, 5) if rank == 1 else (5, 7)
        assert f"is in call 3, all_reduce by ring of {theirs} float32" in str(error)
        assert f"this rank is in call 3, all_reduce by ring of {mine} float32" in str(error)


def test_a_rank_that_left_a_call_out_is_one_number_behind() -> None:
    errors = calls_of([5, 7], [[7, 5, 5], [5, 5]])
    assert "rank 1 is in call 3, all_reduce by ring of 5 float32" in str(errors[0])
    assert "this rank is in call 3, all_reduce by ring of 7 float32" in str(errors[0])


def test_ranks_in_the_same_call_keep_the_error_they_had() -> None:
    errors = calls_of([5], [[5], [5], []])  # rank 2 has gone home
    assert errors[2] is None
    assert "no message exchanged with rank 2: nothing for 1 s" in str(errors[0])


def test_no_note_is_left_while_all_goes_well() -> None:
    fabric = Fabric(2)

    def rank(transport: MemoryTransport) -> None:
        Communicator(transport).all_reduce(np.ones(3))

    assert outcomes(2, rank, fabric) == [None, None]
    assert fabric.notes == {}


def test_who_waited_for_a_survivor_is_told_with_whom_it_began() -> None:
    """In a ring of four with rank 1 dead, rank 3 waits for rank 2, which waited for rank 1."""
    notes = {0: Note(1, "ring", 1), 1: None, 2: Note(1, "ring", 1)}
    assert began_with(3, 2, notes) == [1]
    assert diagnosis(3, Note(1, "ring", 2), notes, "closed") == (
        "closed; rank 1 did not answer: it died, hangs, or has ended"
    )


def test_in_the_engines_own_collective_all_who_left_no_note_are_named() -> None:
    notes = {0: Note(1, "native"), 1: None, 2: None}
    assert "rank 1 and rank 2 did not answer" in diagnosis(3, Note(1, "native"), notes, "closed")


def test_a_rank_one_call_ahead_is_no_mistake_where_another_died() -> None:
    notes = {0: Note(1, "ring", 2), 2: None}
    assert diagnosis(1, Note(2, "ring", 2), notes, "closed").startswith("closed; rank 2 did not answer")


def test_a_different_program_under_the_same_number_is_a_mistake_whoever_is_silent() -> None:
    notes = {0: Note(2, "tree", 2), 2: None}
    assert diagnosis(1, Note(2, "ring", 2), notes, "closed").startswith("rank 0 is in call 2, tree; this rank is in")


def test_a_rank_that_still_compares_programs_is_in_the_same_call() -> None:
    notes = {0: Note(2, "ring of 10", 2), 2: Note(2, "ring of 10 (program 0a0a0a0a)", 1)}
    assert diagnosis(1, Note(2, "ring of 10 (program 0a0a0a0a)", 0), notes, "closed") == "closed"


def test_a_dead_rank_is_named_by_all_others_through_survivors_that_hang_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.failure_diagnosis.LONGEST_SECONDS", 0.5)
    fabric, together = Fabric(5), threading.Barrier(5)

    def rank(transport: MemoryTransport) -> None:
        communicator = Communicator(transport, timeout_seconds=60)
        communicator.all_reduce(np.ones(10))
        together.wait(60)
        if transport.rank == 1:
            fabric.kill(1)
            return
        communicator.all_reduce(np.ones(10))

    for which, error in enumerate(outcomes(5, rank, fabric)):
        assert which == 1 or "rank 1 did not answer: it died, hangs, or has ended" in str(error)


UNTIL = "did not answer before the timeout: "
FEWER = "died, hangs, has ended, or lives and makes fewer calls (fewer batches, or no_sync on some ranks only)"


@pytest.mark.parametrize(("mine", "theirs"), [(True, False), (False, True)])
def test_where_any_rank_waited_until_the_timeout_the_silent_one_may_live(mine: bool, theirs: bool) -> None:
    """Who waits longest closes its connections, so that the others fail now: they see no timeout of their own."""
    waiting, other = Note(4, "a", peer=1, timed_out=mine), Note(4, "a", peer=1, timed_out=theirs)
    assert diagnosis(0, waiting, {1: None, 2: other}, "closed") == f"closed; rank 1 {UNTIL}it {FEWER}"
    several = diagnosis(0, waiting, {1: other, 2: None, 3: None}, "closed")
    assert several == f"closed; rank 2 and rank 3 {UNTIL}which of them {FEWER} cannot be told from here"


@pytest.mark.parametrize(
    ("cause", "timed_out"),
    [
        ("Timed out waiting 3000ms for recv", True),
        ("wait timeout after 3000ms", True),
        ("nothing for 3 s", True),
        ("Connection closed by peer", False),
    ],
)
def test_a_note_says_whether_its_rank_waited_until_the_timeout(cause: str, timed_out: bool) -> None:
    fabric = Fabric(2)
    explained(TransportError("ring", 0, "1", 1, cause), MemoryTransport(fabric, 0), Note(4, "a"), 0.1)
    assert json.loads(fabric.notes[0])["timed_out"] is timed_out


def test_where_all_ranks_live_one_that_did_something_else_is_told() -> None:
    mine, saving = Note(0, "torch's", doing="averaging a bucket"), Note(0, "torch's", doing="writing a checkpoint")
    said = diagnosis(0, mine, {1: mine, 2: saving}, "Timed out")
    assert said.startswith(
        "Timed out; all ranks live, rank 2 in writing a checkpoint: some may make more or fewer calls"
    )
    assert diagnosis(0, mine, {1: mine, 2: mine}, "Timed out") == "Timed out"
    ring = Note(7, "all_reduce by ring", group="ours")
    assert "; all ranks live, rank 1 in all_reduce by ring: " in diagnosis(0, saving, {1: ring}, "closed")
