"""Ranks that meet: one that does not come is named, and a store that says nothing is given up."""

import subprocess
import sys
import threading
from datetime import timedelta

import pytest

pytest.importorskip("torch")
from penstock.cluster.processes import free_port
from penstock.errors import PenstockError, TransportError
from penstock.runtime import transport
from penstock.runtime.connect import connected
from penstock.runtime.transport.meeting import join_group, within


@pytest.fixture(autouse=True)
def this_process_ends_when_it_likes(monkeypatch):
    monkeypatch.setattr(transport, "_gave_up", threading.Event())


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TransportError, match=r"joining the other ranks.*: rank 1 and rank 2 did not come within 0.2 s"):
        join_group("gloo", timedelta(seconds=0.2))


def test_a_rank_0_that_does_not_come_is_said_to_keep_the_store(monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TransportError, match=r"the store in which the ranks met may be gone: rank 0 keeps it"):
        join_group("gloo", timedelta(seconds=0.2))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "abc", "RANK: found 'abc'; wanted a whole number, as torchrun sets it"),
        ("RANK", "-1", "RANK: found '-1'; wanted a whole number"),
        ("RANK", "2", "RANK 2, WORLD_SIZE 2: wanted ranks from 0 to one less than there are"),
        ("WORLD_SIZE", "0", "RANK 0, WORLD_SIZE 0: wanted ranks from 0 to one less"),
        ("WORLD_SIZE", "9" * 400, "WORLD_SIZE: found '9999"),
        ("MASTER_PORT", "99999", "MASTER_PORT: found 99999; wanted 65535 at most"),
    ],
)
def test_a_place_that_no_launcher_gives_is_one_line(monkeypatch, name, value, said):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} | {name: value}
    for each, text in place.items():
        monkeypatch.setenv(each, text)
    with pytest.raises(PenstockError) as raised, connected("gloo"):
        pass  # and what stops an engine that never was raises nothing in its place
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_torch_says_or_raises_in_time_is_returned_or_raised():
    assert within(60.0, lambda: 7) == 7
    with pytest.raises(TimeoutError, match="torch's own"):
        within(60.0, lambda: (_ for _ in ()).throw(TimeoutError("torch's own")))


def test_a_wait_ends_when_no_answer_can_come():
    never = threading.Event()
    with pytest.raises(ConnectionError, match="another rank has given up"):
        within(600.0, never.wait, lambda: True)
    never.set()


ENDS = """
import atexit, ctypes, threading
atexit.register(ctypes.CDLL(None).pause)  # a shutdown that waits for ever, as torch's does
from penstock.runtime.transport import meeting
from penstock.runtime import transport
from penstock.runtime.connect import connected
transport.EXIT_SECONDS = 1
try:
    meeting.within(0.0, threading.Event().wait)
except ConnectionError as error:
    print(error, flush=True)
"""


def test_a_process_ends_though_torchs_shutdown_waits_for_a_store_that_was_given_up():
    ran = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert "the store in which the ranks met does not answer" in ran.stdout
    assert ran.returncode == -14, ran.stderr
