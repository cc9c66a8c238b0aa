"""A rank dies while torch does something with all ranks at our request: the others name it."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.errors import TransportError
from penstock.plan import Bucket, Plan, Route
from penstock.torch import collective_errors
from penstock.torch.collective_errors import who_is_gone
from spawn import spawn, spawn_outcomes
from torch_lost import (
    hear_from_a_rank_that_pickles,
    keep_the_store,
    make_a_group_while_another_gives_up,
    seconds_of_groups,
    seconds_of_messages,
    survive,
    survive_before_a_plan,
    survive_nccl,
    tell_a_store_that_is_gone,
    tell_each_other,
)


@pytest.mark.parametrize("phase", ["construction", "steps"])
def test_a_rank_that_dies_while_torch_communicates_is_named(phase):
    ended = spawn_outcomes(3, survive, 1, phase)
    assert ended[1].exit_code == -9
    for rank in (0, 2):
        assert ended[rank].value.startswith(f"torch.distributed: rank {rank}, step ")
        assert_named(ended[rank].value)


@pytest.mark.parametrize("phase", ["averaging a bucket", "sharing buckets", "measuring"])
def test_a_rank_that_dies_before_there_is_a_plan_is_named(phase):
    ended = spawn_outcomes(2, survive_before_a_plan, 1, phase)
    assert ended[1].exit_code == -9
    assert isinstance(ended[0].value, str), repr(ended[0].value)
    assert f"rank 0, step {phase}" in ended[0].value
    assert_named(ended[0].value)


@pytest.mark.parametrize(
    "when", ["backward", *(pytest.param(when, marks=pytest.mark.slow) for when in ("forward", "later"))]
)
def test_a_rank_that_nccl_loses_without_an_error_is_named(when):
    ended = spawn_outcomes(3, survive_nccl, 1, when)
    assert ended[1].exit_code == -9
    for rank in (0, 2):
        said, aborted = ended[rank].value
        assert "NCCL gave up its messages (comm error)" in said
        assert ("communicator was aborted" in said) == (when == "later")
        assert_named(said)
        assert aborted  # so that no other rank waits for this one


def assert_named(message):
    said = message.split("; ")[-1]  # on a very busy machine another rank's note may come too late
    assert "rank 1" in said
    assert said.endswith("did not answer: it died, hangs, or has ended")


def test_no_rank_goes_on_making_a_group_when_another_has_given_up():
    said, _ = spawn(2, make_a_group_while_another_gives_up)
    assert "step making a process group: no message exchanged with the other ranks: another rank has given up" in said


def test_rank_0_which_may_keep_the_store_stays_until_others_have_read_it():
    assert spawn(2, keep_the_store) == [True, True]


def test_a_store_that_goes_before_a_backward_pass_is_a_transport_error():
    for said in spawn(2, tell_a_store_that_is_gone, 0.2):
        assert "step telling of a backward pass: no message exchanged with the other ranks: Connection reset" in said


def test_messages_wait_no_longer_than_the_process_group_and_five_minutes_at_most():
    assert spawn(1, seconds_of_messages) == [[3.0, 300.0]]


def test_groups_that_we_make_have_the_timeout_of_the_users():
    assert [each.value for each in spawn_outcomes(2, seconds_of_groups, timeout=47.0)] == [[47.0] * 3] * 2


@pytest.mark.parametrize(
    "text",
    [
        "Application timeout caused pair closure",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer",
        "wait timeout after 3000ms, keys: /x",
    ],
)
def test_what_gloo_says_of_a_lost_connection_is_known(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_errors.dist, "get_rank", lambda _group: 3)
    monkeypatch.setattr(collective_errors, "C10dTransport", lambda _group: SimpleNamespace(group_name=""))
    monkeypatch.setattr(collective_errors, "notes_of", lambda _group: None)  # there are none to read
    found = who_is_gone(RuntimeError(text), "averaging a bucket", None)
    assert isinstance(found, TransportError)
    assert str(found).startswith("torch.distributed: rank 3, step averaging a bucket")
    other = RuntimeError("a kernel failed")
    assert who_is_gone(other, "averaging a bucket", None) is other


def test_a_pickle_of_a_rank_is_not_loaded_but_named(tmp_path):
    said = spawn(2, hear_from_a_rank_that_pickles, str(tmp_path / "ran"))
    assert said[0].startswith("message of rank 1 (comparing): head")
    assert not (tmp_path / "ran").exists()


def test_ranks_of_torch_tell_each_other_values_without_pickle():
    plan = Plan("m", 2, "exact", (Bucket(("a",), 4, "ring"),))
    values = [(rank, "text" * rank, Route("ring", "onebit"), {"key": [1.5, None, b"\0"]}) for rank in range(3)]
    for held, told, complaint in spawn(3, tell_each_other):
        assert held == values
        assert told == plan
        assert complaint.startswith("a object to tell other ranks; wanted numbers, strings")


def test_torch_is_asked_to_pickle_nothing():
    package = Path(collective_errors.__file__).parents[1]
    found = [path.name for path in package.rglob("*.py") if re.search(r"dist\.\w+_object(_list)?\b", path.read_text())]
    assert found == []
