"""A million cases of the coverage-guided fuzzer: no crash, nothing outside the output, errors of one class."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    find_spec("atheris") is None, reason="needs atheris, which is in the fuzz extra: pip install .[fuzz]"
)
def test_a_million_hostile_payloads_are_refused_or_stay_inside_their_output(tmp_path):
    script = Path(__file__).parent / "fuzz_decode.py"
    command = [sys.executable, str(script), "-runs=1000000", "-max_len=256", "-verbosity=0", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=1400)
    assert done.returncode == 0, done.stderr[-2000:]
