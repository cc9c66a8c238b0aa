"""Wrong uses of every verb: one line on standard error, exit code 2, and nothing started that takes long."""

import json
import sys

import pytest

from penstock.cli.main import main
from toy_trace import toy_trace

TRACE = toy_trace(1, 10_000, 0.001, forward_seconds=0.02)
NETWORK = "--network gtop-k-1gbe"
OPTIONS = {
    f"plan resnet50 --network gtop-k-1gbe --workers {10**400}": "less than or equal to 1000000000000000000",
    f"train --workers {10**400}": "less than or equal to 1024",  # as many commands would be made, until memory is full
    f"demo --workers {10**400}": "less than or equal to 1024",
    # typer's own checks
    f"plan trace.json {NETWORK} --workers 0": "'--workers': Input should be greater than or equal to 1 (found '0')",
    "plan trace.json": "Missing option '--network'; see `penstock plan --help`",
    "plan": "Missing argument 'TRACE'",
    "doctor --nope": "No such option: --nope; see `penstock doctor --help`",
    "bench nope": "No such command 'nope'; see `penstock bench --help`",
    "cluster run": "Missing argument 'CMD...'",
    f"simulate trace.json {NETWORK} --seed -1 --jitter 0.1": "'--seed': Input should be greater than or equal to 0",
    "cluster run --timeout -1 -- true": "'--timeout'",
    "cluster check --tolerance -1": "'--tolerance'",
    "bench codecs --nbytes -1": "'--nbytes'",
    "bench collectives --rounds 0": "'--rounds'",
    "train --steps 0": "'--steps'",
    "verify ring --workers 1000000": "'--workers': Input should be less than or equal to 1024 (found '1000000')",
    f"simulate trace.json {NETWORK} --jitter 0.1 --iterations 0": "'--iterations': Input should be greater than or equ",
}
FILES = {
    f"plan missing.json {NETWORK}": "'missing.json' is neither a file nor a shipped trace",
    f"plan folder {NETWORK}": "folder: file: found 'Is a directory'; wanted a readable penstock-trace/1 file",
    f"plan empty.json {NETWORK}": "empty.json: JSON: found",
    f"plan old.json {NETWORK}": "format: found 'penstock-trace/0'; wanted one of penstock-trace/1",
    "plan trace.json --network trace.json": "found 'penstock-trace/1'; wanted one of penstock-network/1",
    f"plan trace.json {NETWORK} --out folder": "folder: file: found 'Is a directory'; wanted a path",
    "verify trace.json": "found 'penstock-trace/1'; wanted one of penstock-program/1",
    "compile bytes.cll": "bytes.cll: found bytes that are no text",
    "compile onebit --out folder": "folder: found 'Is a directory'; wanted a path that can be read or written",
    "compile onebit --out nowhere/x": "found 'No such file or directory'; wanted a path",
    "reproduce mg-wfbp --pictures trace.json": "trace.json: found 'File exists'",
    "reproduce hipress --record links.json": "found 'links'; wanted casync",
    "reproduce mg-wfbp --record links.json": "this paper takes no record; leave --record out",
    "report trace.json": "trace.json is not a folder",
    "measure --out folder": "folder: found a folder; wanted the name of a file to write",
    "profile resnet20 --out folder": "folder: found a folder; wanted the name of a file to write",
    "bench train --out folder": "folder: found a folder; wanted the name of a file to write",
    "train --save trace.json": "trace.json: found a file; wanted a folder",
    "train --out trace.json": "trace.json: found a file; wanted a folder",
    "train --tensorboard trace.json": "trace.json: found a file; wanted a folder",
    "demo --out trace.json": "trace.json: found a file; wanted a folder",
    "train --out trace.json/runs": "trace.json/runs: found 'Not a directory' in trace.json; wanted a path to write to",
    "train --save trace.json/a/b": "trace.json/a/b: found 'Not a directory' in trace.json; wanted a path to write to",
    "bench codecs --out trace.json/x": "trace.json/x: found 'Not a directory' in trace.json; wanted a path to write to",
    "measure --out /proc/x.json": "/proc/x.json: found ",
}
CHOICES = {
    "train --epochs 1 --steps 2": "--steps 2 and --epochs 1: both say how long; leave out one",
    "train --stock --planner exact": "--stock and --planner exact: both say who plans; leave out one",
    "train --compare --stock": "--compare with stock DDP: found one way twice",
    "train --stock --density 0.1": "--density without --codec",
    "train --stock --strategy ring": "--strategy ring with stock DDP, which has an all-reduce; leave out one",
    "train --codec gtopk --warmup-every 4": "--warmup-every 4 without --warmup: wanted densities to begin with",
    "train --save-every 5": "--save-every 5 without --save: wanted a folder for checkpoints",
    "check gpt3": "no task called 'gpt3'; wanted one of chars,",
    "check train.py": "no task called 'train.py'; wanted train.py:FUNCTION",
    "profile gpt3": "no task called 'gpt3'; wanted one of chars,",
    "train --task gpt3": "no task called 'gpt3'; wanted one of chars,",
    "demo --rate fast": "rate 'fast': wanted a number and one of bit, kbit, mbit, gbit",
    "replay trace.json --hosts 1": "--hosts 1: one host sends nothing; wanted 2 or more",
    f"plan trace.json {NETWORK} --codecs onebti": "codec 'onebti'; wanted one of ",
    f"simulate trace.json {NETWORK} --codecs onebti": "(did you mean 'onebit'?)",
    f"plan trace.json {NETWORK} --all-reduce rng": "(did you mean 'ring'?)",
    "replay trace.json --hosts 2 --planner best": "no planner called 'best'",
    "replay trace.json --hosts 2 --plan missing.json": "missing.json: file: found 'No such file or directory'",
    "replay trace.json --hosts 2 --network best": "no network called 'best'",
    "replay trace.json --hosts 2 --strategy best": "no all-reduce strategy called 'best'; wanted one of ring,",
    "replay trace.json --hosts 2 --codecs best": "codec 'best'; wanted one of",
    "measure --strategies best": "no all-reduce strategy called 'best'",
    "measure --codecs best": "codec 'best'; wanted one of",
    "train --codec blcks": "terngrad(bitwidth=2) (did you mean 'blocks'?)",
    "train --codec blocks(bit=4)": "wanted bits, block, feedback, stochastic (did you mean 'bits'?)",
    "train --codec gtopk(densty=0.1)": "no parameter 'densty'; wanted density or value_bits (did you mean 'density'?)",
    "train --planner exat": "(did you mean 'exact'?)",
    "train --strategy rng": "(did you mean 'ring'?)",
    "compile onebti": "(did you mean 'onebit'?)",
    "compile onebit --backend nmba": "(did you mean 'numba'?)",
    "compile terngrad --param bitwith=2": "(did you mean 'bitwidth'?)",
    "reproduce hipres": "(did you mean 'hipress'?)",
    "bench collectives --links best": "links 'best'; wanted smooth or coarse",
}
USERS_CODE = {
    "train --task broken.py:task": "broken.py cannot be imported: RuntimeError: hm; `python broken.py` shows where",
    "profile broken:task": "broken cannot be imported: RuntimeError: hm; `python -c 'import broken'` shows where",
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.json").touch()
    (tmp_path / "bytes.cll").write_bytes(bytes(range(256)))
    (tmp_path / "broken.py").write_text('raise RuntimeError("hm")\n')
    (tmp_path / "trace.json").write_text(json.dumps(TRACE))
    (tmp_path / "old.json").write_text(json.dumps(TRACE | {"format": "penstock-trace/0"}))
    record = dict.fromkeys(("date", "command", "commit", "machine", "versions", "rows"))
    (tmp_path / "links.json").write_text(json.dumps({"format": "penstock-bench/1", "benchmark": "links", **record}))


@pytest.mark.parametrize(("words", "message"), (OPTIONS | FILES | CHOICES | USERS_CODE).items())
def test_a_wrong_use_is_one_line(capsys, monkeypatch, files, words, message):
    monkeypatch.setattr(sys, "argv", ["penstock", *words.split()])
    with pytest.raises(SystemExit) as end:
        main()
    complaint = capsys.readouterr().err
    assert complaint.startswith("penstock: ")
    assert message in complaint
    assert complaint.count("\n") == 1
    assert end.value.code == 2


def test_no_words_at_all_show_the_help(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["penstock"])
    with pytest.raises(SystemExit) as end:
        main()
    shown = capsys.readouterr()
    assert "plan it, prove it" in shown.out + shown.err
    assert end.value.code == 2


@pytest.mark.parametrize("verb", ["check", "profile", "train --task"])
def test_a_misspelt_task_is_refused_before_torch_is_imported(capsys, monkeypatch, verb):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    monkeypatch.setattr(sys, "argv", ["penstock", *verb.split(), "gpt3"])
    with pytest.raises(SystemExit) as end:
        main()
    assert "no task called 'gpt3'" in capsys.readouterr().err
    assert end.value.code == 2


def test_ctrl_c_ends_a_verb_with_one_line(capsys, monkeypatch):
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.traces.find_trace", interrupted)
    monkeypatch.setattr(sys, "argv", ["penstock", "simulate", "resnet50", *NETWORK.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert capsys.readouterr().err == "penstock: interrupted\n"
    assert end.value.code == 130
