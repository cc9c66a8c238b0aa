"""What penstock says, on which rank, and what a program sees of it that configures nothing."""

import logging
import subprocess
import sys
import threading

import pytest

from penstock.log import Voice


class Heard(logging.Handler):
    """Keeps records, and tells when one has come."""

    def __init__(self):
        super().__init__()
        self.records = []
        self.came = threading.Event()

    def emit(self, record):
        self.records.append((record.levelname, record.getMessage()))
        self.came.set()


@pytest.fixture
def heard():
    logger, handler = logging.getLogger("penstock"), Heard()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_step_is_told_before_and_after(heard):
    with Voice(True).step("measuring ring+onebit"):
        assert heard.records == [("INFO", "measuring ring+onebit")]
    level, text = heard.records[1]
    assert level == "INFO"
    assert text.startswith("measuring ring+onebit: took 0.")


def test_what_takes_longer_than_two_seconds_is_told_while_it_lasts_and_when_it_is_over(heard):
    voice = Voice(True, patience_seconds=0.01)
    with voice.holding_up("planning") as outcome, voice.step("measuring native"):
        while not any(level == "WARNING" for level, _ in heard.records):
            heard.came.clear()
            assert heard.came.wait(60)
        outcome.append("3 messages by native")
    warned = [text for level, text in heard.records if level == "WARNING"]
    assert warned[0].startswith("training waits for penstock: planning (measuring native), ")
    assert warned[-1].startswith("training goes on, planning took ")
    assert warned[-1].endswith("s; 3 messages by native")


def test_what_takes_less_is_told_to_those_who_ask_only(heard):
    with Voice(True).holding_up("planning"):
        pass
    assert [level for level, _ in heard.records] == ["INFO"]


def test_other_ranks_say_nothing(heard):
    voice = Voice(False, patience_seconds=0.001)
    with voice.holding_up("planning"), voice.step("measuring"):
        voice.say("something")
        voice.warn("something")
        threading.Event().wait(0.05)
    assert heard.records == []


def test_what_is_raised_inside_is_raised_and_no_thread_stays():
    with pytest.raises(ValueError, match="inside"), Voice(True).holding_up("planning"):
        raise ValueError("inside")
    assert not any(thread.name == "penstock-log" for thread in threading.enumerate())


SCRIPT = """
import logging, threading
from penstock.log import Voice
{configure}
with Voice(True, patience_seconds=0.01).holding_up("planning"):
    threading.Event().wait(1.0)
"""


@pytest.mark.parametrize(
    ("configure", "seen"), [("", True), ("logging.getLogger('penstock').setLevel(logging.ERROR)", False)]
)
def test_a_program_that_configures_no_logging_sees_what_holds_it_up_and_can_silence_it(configure, seen):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(configure=configure)], capture_output=True, text=True, check=True
    )
    assert ("training waits for penstock: planning" in done.stderr) == seen
    assert done.stdout == ""
