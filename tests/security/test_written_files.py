"""Files that are written take the place of nothing but files, whatever lies where they belong."""

import os
import stat
from pathlib import Path

import pytest

from penstock.errors import FormatError
from penstock.fields import write_json
from penstock.report.write_report import write_report
from penstock.run_record import save_run
from report_samples import sample_runs


def test_a_pipe_stays_a_pipe_and_a_link_to_a_device_a_link(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "null"):
        with pytest.raises(FormatError, match=f"{name}: file: found 'a pipe or a device'; wanted a path that can be"):
            write_json(tmp_path / name, {})
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    assert (tmp_path / "null").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_no_name_in_the_folder_of_devices_is_written():
    """There /dev/stdout is a link, often to a file: root would replace it for all."""
    path = Path(f"/dev/penstock-{os.getpid()}.json")
    try:
        with pytest.raises(FormatError, match="found 'a name among devices'; wanted a path that can be written"):
            write_json(path, {})
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["report.html", "report.json", "report.perfetto.json"])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_link_planted_in_a_folder_of_runs_leads_the_report_nowhere(tmp_path, name, hidden):
    runs, victim = tmp_path / "runs", tmp_path / "victim"
    victim.write_text("mine")
    save_run(sample_runs()[0], runs / "a" / "run.json")
    name = f".{name}.{os.getpid()}.partial" if hidden else name  # planted for every number that a process may have
    (runs / name).symlink_to(victim)
    write_report(runs)
    assert victim.read_text() == "mine"
    assert {path.name for path in runs.iterdir()} == {"a", "report.html", "report.json", "report.perfetto.json"}
    assert not any(path.is_symlink() for path in runs.iterdir())


def test_a_page_that_cannot_be_written_whole_leaves_the_one_before(tmp_path, monkeypatch):
    save_run(sample_runs()[0], tmp_path / "a" / "run.json")
    (tmp_path / "report.html").write_text("before")
    replace = Path.replace

    def full(path, target):
        if target.name == "report.html":
            raise OSError(28, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(FormatError, match=r"report\.html: file: found 'No space left on device'"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "before"
    assert not list(tmp_path.glob("*partial"))
