"""Every example prints what its `.out` file says."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_prints_what_its_out_file_says(script):
    expected = script.with_suffix(".out")
    assert expected.exists(), f"{script.name} has no .out file beside it"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected.read_text()
