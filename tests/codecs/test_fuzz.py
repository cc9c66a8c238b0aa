"""A million cases of a coverage-guided fuzzer: no crash, nothing outside the output, errors of one class."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = 1_000_000


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_million_hostile_payloads_are_refused_or_stay_inside_their_output(tmp_path):
    if find_spec("atheris"):
        command = [str(HERE / "fuzz_decode.py"), f"-runs={CASES}", "-max_len=256", "-verbosity=0", str(tmp_path)]
    else:  # the fuzz extra has it; without, a fuzzer in plain Python
        command = [str(HERE / "coverage_fuzz.py"), str(CASES)]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=1400
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_fuzzer_finds_what_its_first_inputs_do_not_reach():
    script = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import coverage_fuzz; print(*coverage_fuzz.fuzz(2000, look=5))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    inputs, steps = map(int, done.stdout.split())
    assert inputs > 13 * 8  # some of the mutated inputs joined the corpus
    assert steps > 100
