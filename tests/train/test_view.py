"""What a viewer shows: the newest values in words, one line at a time or in a panel."""

import io
import json

import pytest
from rich.console import Console

from penstock.errors import TrainError
from penstock.train.events import Event, event_from_line, tell_launcher
from penstock.train.view import JsonView, LiveView, PlainView, Seen, TensorBoard, sparkline

READY = Event("ready", 0, {"steps": 10, "explain": "plan a by exact: 3 messages\nmore", "metric_name": "bits"})
STEPS = Event(
    "steps",
    4,
    {
        "steps": 10,
        "seconds": 2.0,
        "loss": 2.5,
        "iteration_seconds": 0.5,
        "compute_seconds": 0.3,
        "hidden_seconds": 0.1,
        "exposed_seconds": 0.2,
        "samples_per_second": 64.0,
        "bytes_per_iteration": 1e6,
        "dense_bytes_per_iteration": 3.1e7,
        "plan": "3 messages by exact",
    },
)
EVALUATED = Event("evaluated", 4, {"seconds": 2.0, "metric": 3.25})
NOT_FINITE = Event("steps", 5, STEPS.values | {"loss": None, "hidden_seconds": None, "samples_per_second": None})


def test_the_newest_values_are_told_in_words():
    seen = Seen()
    assert seen.words() == {"state": "starting workers, profiling, planning"}
    for event in (READY, EVALUATED, STEPS):
        seen.take(event)
    assert seen.words() == {
        "step": "4 of 10, 2 s",
        "loss": "2.5",
        "bits": "3.25",
        "speed": "64 samples/s",
        "iteration": "500 ms = 300 compute + 200 exposed communication (100 hidden)",
        "sent": "1 MB per worker and iteration, 31.0x less than dense",
        "plan": "3 messages by exact",
    }


def test_values_that_are_not_known_are_dashes():
    seen = Seen()
    seen.take(NOT_FINITE)
    words = seen.words()
    assert words["loss"] == "-"
    assert words["speed"] == "- samples/s"
    assert words["iteration"].endswith("(? hidden)")
    assert seen.losses == []


def test_plain_lines_come_at_most_every_two_seconds(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("penstock.train.view.monotonic", lambda: now[0])
    view = PlainView("a title")
    view(READY)
    for now[0] in (100.0, 101.9, 102.1, 103.9):
        view(STEPS)
    for event in (Event("saved", 4, {"path": "there"}), Event("done", 10, {})):
        view(event)
    shown = capsys.readouterr().err.splitlines()
    assert shown[:2] == ["a title", "ready: plan a by exact: 3 messages"]
    assert [line.split()[0] for line in shown[2:]] == ["step", "step", "saved", "step"]


def test_the_panel_holds_everything(monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr("penstock.train.view.Console", lambda **_: screen)
    view = LiveView("a title")
    for event in (READY, EVALUATED, STEPS):
        view(event)
    view.close()
    shown = screen.file.getvalue()
    for words in ("a title", "4 of 10", "200 exposed communication", "31.0x less than dense", "3 messages by exact"):
        assert words in shown


def test_words_that_look_like_markup_are_shown_as_they_are(monkeypatch):
    screen = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    monkeypatch.setattr("penstock.train.view.Console", lambda **_: screen)
    view = LiveView("[/title]")
    view(Event("steps", 4, STEPS.values | {"plan": "[/plan]"}))
    view(Event("saved", 4, {"path": "[/saved]"}))
    view.close()
    for words in ("[/title]", "[/plan]", "saved [/saved]"):
        assert words in screen.file.getvalue()


def test_json_is_one_flat_object_per_line(capsys):
    JsonView()(STEPS)
    assert json.loads(capsys.readouterr().out) == {"event": "steps", "step": 4, **STEPS.values}


def test_events_survive_the_pipe_and_talk_is_no_event(capsys):
    tell_launcher(STEPS)
    assert event_from_line(capsys.readouterr().out) == STEPS
    assert event_from_line("a warning\n") is None


@pytest.mark.parametrize(("values", "curve"), [([], ""), ([1.0], "▁"), ([3, 2, 1, 0], "█▆▃▁"), ([5, 5], "▁▁")], ids=str)
def test_a_curve_of_blocks(values, curve):
    assert sparkline(values) == curve
    assert len(sparkline(values * 100)) == min(60, 100 * len(values))


def test_tensorboard_gets_scalars(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(str(tmp_path))
    for event in (READY, EVALUATED, STEPS, NOT_FINITE):
        board(event)
    board.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(item.step, item.value) for item in found.Scalars("loss")] == [(4, 2.5)]
    assert found.Scalars("metric")[0].value == 3.25
    assert len(found.Scalars("exposed_seconds")) == 2


def test_without_tensorboard_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainError, match=r"needs the package tensorboard.*pip install 'penstock\[tensorboard\]'"):
        TensorBoard("anywhere")
