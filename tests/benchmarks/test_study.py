"""How a study is started: with its options, or as one of its ranks; wrong options are one line."""

import sys

import pytest

from casync import casync
from gains import gains
from gtop_k import gtop_k
from joint import compare_joint
from memory import memory
from page import page
from planning_time import planning_time
from study import RANK, start

WRONG = [
    (casync, "--traces resnet50:best", "no all-reduce strategy called 'best'"),
    (casync, "--study best", "--study: found 'best'; wanted steps or joint"),
    (compare_joint, "--traces alexnet", "'alexnet' is neither a file nor a shipped trace"),
    (gains, "--settings resnet50", "wanted TRACE:HOSTS:RATE:LATENCY"),
    (gtop_k, "--links best", "links 'best'; wanted smooth or coarse"),
    (memory, "--methods best", "no method called 'best'; wanted one of ddp-views"),
    (page, "--results nowhere", "no benchmark records in nowhere"),
    (planning_time, "--out folder", "folder: found a folder; wanted the name of a file to write"),
    (planning_time, "--nope", "No such option: --nope; see `python benchmarks/planning_time.py --help`"),
]


@pytest.mark.parametrize(("study", "options", "message"), WRONG, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_wrong_use_is_one_line(capsys, monkeypatch, tmp_path, study, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{study.__name__}.py", *options.split()])
    with pytest.raises(SystemExit) as end:
        start(study)
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1
    assert end.value.code == 2


def test_a_script_started_as_a_rank_measures_the_job_and_no_study(monkeypatch):
    started = []
    monkeypatch.setattr(sys, "argv", ["benchmarks/casync.py", RANK, "{}"])
    start(lambda: started.append("study"), lambda: started.append("rank"))
    assert started == ["rank"]
