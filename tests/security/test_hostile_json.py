"""JSON files of every kind with what no writer of ours puts there: one clear line each."""

import json
import os
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from penstock.bench.record import load_record
from penstock.cli.main import app
from penstock.cli.output import print_json, print_lines, print_table, progress
from penstock.errors import FormatError, NetworkError, PenstockError
from penstock.fields import write_json
from penstock.network import load_network
from penstock.plan import load_plan
from penstock.program.document import load_program
from penstock.report.found_runs import find_runs
from penstock.run_record import load_run
from penstock.trace import load_trace, save_trace, trace_from_csv
from penstock.traces import load_shipped

FORMATS = {
    "penstock-network/1": load_network,
    "penstock-trace/1": load_trace,
    "penstock-plan/1": load_plan,
    "penstock-program/1": load_program,
    "penstock-run/1": load_run,
}
LONG = "9" * 400
CASES = {
    "400 digits": f'"workers": {LONG}, "alpha_seconds": {LONG}, "steps": {LONG}',
    "400 digits after a minus": f'"workers": -{LONG}',
    "5000 digits": f'"workers": {"9" * 5000}',
    "2^63": f'"workers": {2**63}',
    "an exponent": '"alpha_seconds": 1e999999',
    "half a pair": r'"name": "\ud800"',
    "half a pair as a key": r'"\uDC00": 1',
    "a key of two lines": '"two\\nlines": 1',
    "a long key": f'"{"x" * 10_000}": 1',
    "deep nesting": f'"x": {"[" * 100_000}{"]" * 100_000}',
    **{f"nesting of {depth}": f'"workers": {"[" * depth}{"]" * depth}' for depth in (300, 800, 900, 950, 980, 990)},
}


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_hostile_json_is_one_line_that_names_the_file(format_, case, tmp_path):
    path = tmp_path / "hostile.json"
    path.write_text(f'{{"format": "{format_}", {CASES[case]}}}')
    with pytest.raises(PenstockError) as raised:
        FORMATS[format_](path)
    said = str(raised.value)
    assert said.startswith(f"{path}: ")
    assert said.encode().isascii()
    assert said.isprintable()
    assert len(said) < 1000


@pytest.mark.parametrize("read", [*FORMATS.values(), load_record, trace_from_csv])
def test_a_pipe_or_a_device_is_not_read_for_ever(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        with pytest.raises(FormatError, match=f"{name}: file: .*a pipe or a device"):
            read(tmp_path / name)


def test_a_run_that_is_a_pipe_does_not_hold_up_the_report(tmp_path):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "run.json")
    with pytest.raises(FormatError, match=r"run/run\.json: file: found 'a pipe or a device'"):
        find_runs(tmp_path)


def test_words_from_files_are_shown_as_they_are_and_not_obeyed(capsys):
    hostile = "[/x][red]y :smile: \x1b[31m\x07\u202e\u2028 z"
    shown = "[/x][red]y :smile: ?[31m??? z"
    print_table(hostile, ["name", hostile], [[hostile, 1.5], ["two\nlines", 2.0]], hostile)
    print_lines(hostile)
    said = capsys.readouterr().out
    assert said.count(shown) == 5
    assert str(NetworkError(hostile)) == shown
    with progress("title", 1) as done:
        done(hostile)


def test_a_whole_pair_is_a_letter(tmp_path):
    path = tmp_path / "network.json"
    document = {"format": "penstock-network/1", "name": "\U0001f600", "workers": 2, "alpha_seconds": 1}
    path.write_text(json.dumps(document | {"beta_seconds_per_byte": 1e-9, "gamma_seconds_per_byte": 0}))
    assert "\\ud83d" in path.read_text()
    assert load_network(path).name == "\U0001f600"


def test_numbers_that_are_finite_and_add_up_to_infinity_are_one_line(tmp_path):
    path = tmp_path / "run.json"
    with pytest.raises(FormatError, match="wanted finite numbers: those it was made from are too large") as raised:
        write_json(path, {"seconds": 1e308 + 1e308})
    assert str(raised.value).startswith(f"{path}: JSON: found ")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FormatError, match="--json: JSON: found "):
        print_json({"ratio": 1.0 / 5e-324})


def test_a_study_of_seconds_without_end_is_one_line(tmp_path):
    save_trace(replace(load_shipped("vgg16"), forward_seconds=1e308), tmp_path / "trace.json")
    command = ["simulate", str(tmp_path / "trace.json"), "--network", "hipress-56gbps", "--workers", "4", "--json"]
    assert isinstance(CliRunner().invoke(app, command).exception, FormatError)


def test_a_long_name_does_not_make_a_long_message():
    said = str(NetworkError(f"network {'x' * 10**6!r} has no curves of codec 'onebit'"))
    assert len(said) < 2100
    assert said.startswith("network 'xx")
    assert said.endswith("has no curves of codec 'onebit'")
