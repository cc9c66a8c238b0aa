"""`penstock profile` as a user types it."""

import json
import subprocess
import sys

import pytest

from command import penstock
from penstock.trace import load_trace

pytest.importorskip("torch", reason="profiling needs torch")
USERS = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)
    def forward(self, x):
        return self.used(x)
"""


def alone(*arguments, cwd):
    """Run a command in a process of its own: it measures, and imports from the directory that it starts in."""
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_a_table_of_the_slowest_tensors_and_a_trace_that_penstock_reads(tmp_path):
    out = tmp_path / "t.json"
    result = alone("profile", "gpt-small", "--batch", 1, "--iterations", 3, "--top", 4, "--out", out, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.count("transformer.") == 4
    assert "small GPT, batch 1 on" in result.stdout
    trace = load_trace(out)
    assert (trace.model, trace.batch, trace.times, len(trace.tensors)) == ("small GPT", 1, "measured", 52)
    planned = penstock("plan", out, "--network", "gtop-k-1gbe", "--json")
    assert planned.returncode == 0, planned.stderr


def test_a_users_own_module_in_the_working_directory(tmp_path):
    (tmp_path / "mine.py").write_text(USERS)
    arguments = ("profile", "mine:Net", "--input-shape", "5,3", "--iterations", 2, "--json")
    result = alone(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert sorted(tensor["name"] for tensor in document["tensors"]) == ["used.bias", "used.weight"]
    assert document["unused"] == ["unused.weight", "unused.bias"]
    assert len(document["tensor_spread_seconds"]) == 2
    assert (document["iterations"], document["model"], document["batch"]) == (2, "Net", 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet51"], "penstock: no task called 'resnet51'; wanted one of "),
        (["gpt_small", "--device", "tpu7"], "penstock: device 'tpu7'; wanted auto, cpu, cuda or cuda:N"),
        (["gpt_small", "--input-shape", "3,x"], "penstock: --input-shape: found '3,x'; wanted whole numbers > 0"),
        (["gpt_small", "--dtype", "int8"], "penstock: dtype 'int8'; wanted one of float32, bfloat16"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    result = penstock("profile", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
