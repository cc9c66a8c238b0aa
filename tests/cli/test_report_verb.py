"""`penstock report` as a user types it."""

import json

import pytest

from command import penstock
from report_samples import save_sample_runs


def test_a_report_is_a_page_its_data_and_a_perfetto_file(tmp_path):
    result = penstock("report", save_sample_runs(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "worse held-out bits per character than stock DDP" in result.stdout
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((tmp_path / "report.json").read_text())["format"] == "penstock-report/1"
    assert json.loads((tmp_path / "report.perfetto.json").read_text())["traceEvents"]


def test_json_prints_what_the_file_holds(tmp_path):
    out = tmp_path / "deep" / "page.html"
    result = penstock("report", save_sample_runs(tmp_path / "runs"), "--out", out, "--json", "--baseline", "onebit")
    assert json.loads(result.stdout) == json.loads((tmp_path / "deep" / "page.json").read_text())
    assert json.loads(result.stdout)["methods"][0]["baseline"] == "onebit"
    assert out.exists()


@pytest.mark.parametrize(
    ("break_it", "wanted"),
    [
        (lambda folder: (folder / "onebit" / "run.json").write_text("{}"), "format: found nothing; wanted one of"),
        (lambda folder: [path.unlink() for path in folder.rglob("run.json")], "no run.json below"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_code_2(tmp_path, break_it, wanted):
    break_it(save_sample_runs(tmp_path))
    result = penstock("report", tmp_path)
    assert result.returncode == 2
    assert wanted in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_the_page_cannot_be_its_own_data(tmp_path):
    result = penstock("report", save_sample_runs(tmp_path), "--out", tmp_path / "x.json")
    assert result.returncode == 2
    assert "a name that does not end in .json, such as report.html" in result.stderr
