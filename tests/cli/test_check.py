"""`penstock check`: alone by prediction, without torch; under torchrun and mpirun from real iterations."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command import penstock
from penstock.cli import check

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
LABELS = ["your iteration", "merging", "codecs", "answer", "write"]


def test_alone_it_answers_in_five_lines_and_a_picture():
    result = penstock("check", "gpt2", "--rate", "10gbit", "--workers", 8)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("GPT-2, batch 8: trace of an H200, not your GPU; 8 workers, 10 Gb/s")
    assert [line.split("  ")[0] for line in lines[2:7]] == LABELS
    assert "without the optimizer's step" in lines[2]
    assert "yes:" in lines[5]
    assert 'codec="blocks(bits=4)"' in lines[6]
    assert any(line.startswith("advised network |") for line in lines)


@pytest.mark.parametrize("rate", ["1.6tbit", "none"])
def test_it_says_no_where_the_answer_is_no(rate):
    found = json.loads(penstock("check", "densenet201", "--rate", rate, "--json").stdout)
    assert (found["answer"], found["write"], found["codec"]) == ("no", "", None)


def test_it_needs_no_torch_for_a_model_of_ours():
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['penstock', 'check', 'resnet50', '--json']"
    code += "; from penstock.cli.main import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert json.loads(result.stdout)["model"] == "ResNet-50", result.stderr


WRONG = {
    "gpt2 --batch 3": "--batch: the shipped trace of gpt2 has batch 8, and there is no GPU here",
    "gpt2 --rate 3tbit": "rate '3tbit': wanted 100kbit to 1600gbit",
    "gpt2 --optimizer adamww": "wanted one of adamw, adam, sgd, other (did you mean 'adamw'?)",
    "gtp2": "no task called 'gtp2'",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_what_cannot_be_used_is_said_in_one_line(arguments, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = penstock("check", *arguments.split())
    assert result.returncode == 2
    assert WRONG[arguments] in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--workers 4", "--rate 1gbit", "--latency 5us"])
def test_under_a_launcher_a_described_network_is_refused(option, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    result = penstock("check", "chars", *option.split())
    assert result.returncode == 2
    assert f"{option.split()[0]}: workers that a launcher started are counted" in result.stderr


def test_under_a_launcher_one_worker_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert "one worker sends nothing; start two or more" in penstock("check", "chars").stderr


def test_at_the_deadline_it_ends_with_one_line():
    code = "from penstock.cli import check; check.DEADLINE_SECONDS = 0.05; check._give_up()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("penstock: check: no answer after 0.05 s")
    assert check.DEADLINE_SECONDS == 60


MINE = "from torch import nn\n\ndef model():\n    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))\n"


@pytest.mark.slow  # compiles kernels
def test_a_models_own_function_is_profiled_and_its_codecs_measured(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    arguments = (f"{path}:model", "--input-shape", 64, "--batch", 4, "--rate", "1gbit", "--seconds", 2)
    result = penstock("check", *arguments)
    assert result.returncode == 0, result.stderr
    assert "profiled here on" in result.stdout
    assert "codecs: measured here" in result.stdout
    assert "(predicted)" in result.stdout  # with the step of its optimizer, SGD


@pytest.mark.slow
def test_a_model_that_is_too_slow_ends_at_the_deadline(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(MINE + "import time\ntime.sleep(600)\n")
    code = "import sys; from penstock.cli import check; check.DEADLINE_SECONDS = 3.0; "
    code += f"sys.argv = ['penstock', 'check', '{path}:model']; from penstock.cli.main import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert "no answer after 3 s" in result.stderr


def assert_measured(result: subprocess.CompletedProcess[str], stock: str) -> None:
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    (iteration,) = [line for line in lines if line.startswith("your iteration")]
    (picture,) = [line for line in lines if line.startswith("stock compute")]
    assert f"with {stock} on 2 workers (measured, spread " in iteration
    assert iteration.split()[2:4] == picture.rsplit("| ", 1)[1].split()  # the picture ends where the iteration does
    (codecs,) = [line for line in lines if line.startswith("codecs  ")]
    assert all(codec in codecs for codec in ("bf16", "blocks(bits=8)", "blocks(bits=4)"))  # measured, or with a bound
    assert sum(line.startswith("answer ") for line in lines) == 1


@pytest.mark.slow
def test_under_torchrun_it_measures_real_iterations():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "penstock", "check", "chars", "--seconds", "4"]
    assert_measured(subprocess.run(command, capture_output=True, text=True, check=False), "stock DDP")


@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun on PATH (pip install penstock[mpi])")
def test_under_mpirun_it_measures_mpi():
    command = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", "PYTHONPATH", sys.executable]
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    command += ["-m", "penstock", "check", "chars", "--seconds", "4", "--optimizer", "sgd"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert_measured(result, "stock DDP's messages over MPI")
