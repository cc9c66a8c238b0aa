"""Every example prints what its `.out` file says."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"with_lightning": "lightning", "with_accelerate": "accelerate"}  # of the extra `examples`


SLOW = pytest.mark.slow
SCRIPTS = [
    pytest.param(path, id=path.name, marks=[SLOW] if path.stem in NEEDS else [])
    for path in sorted(EXAMPLES.glob("*.py"))
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_prints_what_its_out_file_says(script):
    if script.stem in NEEDS:
        pytest.importorskip(NEEDS[script.stem], reason=f"{script.name} needs penstock[examples]")
    expected = script.with_suffix(".out")
    assert expected.exists(), f"{script.name} has no .out file beside it"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected.read_text()


def test_moving_to_penstock_changes_one_import_and_nothing_else():
    before, after = ((EXAMPLES / f"train_ddp{end}.py").read_text() for end in ("_before", ""))
    code = [text.split('"""')[2].splitlines() for text in (before, after)]
    changed = [(old, new) for old, new in zip(*code, strict=True) if old != new]
    wrapper = "import DistributedDataParallel as DDP"
    assert changed == [(f"from torch.nn.parallel {wrapper}", f"from penstock.torch {wrapper}")]


def test_the_example_trains_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run([*command, EXAMPLES / "train_ddp.py"], capture_output=True, text=True, check=False)
    assert result.stdout == "learned the circle\n", result.stderr
