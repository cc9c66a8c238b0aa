"""`penstock check`: alone by prediction, without torch; under torchrun from real iterations."""

import json
import subprocess
import sys

import pytest

from command import penstock


def test_alone_it_answers_in_five_lines_and_a_picture():
    result = penstock("check", "gpt2", "--rate", "10gbit", "--workers", 8)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[2:7]] == ["your iteration", "merging", "codecs", "answer", "write"]
    assert "yes:" in lines[5]
    assert 'codec="blocks(bits=4)"' in lines[6]
    assert any(line.startswith("advised network |") for line in lines)


def test_it_says_no_where_the_answer_is_no():
    result = penstock("check", "densenet201", "--rate", "100gbit", "--workers", 2, "--latency", "1us", "--json")
    found = json.loads(result.stdout)
    assert found["write"] == ""
    assert found["codec"] is None


def test_it_needs_no_torch_for_a_model_of_ours():
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['penstock', 'check', 'resnet50', '--json']"
    code += "; from penstock.cli.main import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert json.loads(result.stdout)["model"] == "ResNet-50", result.stderr


@pytest.mark.slow  # compiles kernels
def test_a_models_own_function_is_profiled_and_its_codecs_measured(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\n\ndef model():\n    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))\n"
    )
    arguments = (f"{path}:model", "--input-shape", 64, "--batch", 4, "--rate", "1gbit", "--seconds", 2)
    result = penstock("check", *arguments)
    assert result.returncode == 0, result.stderr
    assert "codecs: measured here" in result.stdout


@pytest.mark.slow
def test_under_torchrun_it_measures_real_iterations():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "penstock", "check", "chars", "--seconds", "10"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "with stock DDP on 2 workers (measured)" in result.stdout
    assert result.stdout.count("answer ") == 1
