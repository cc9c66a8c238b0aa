"""Looking at a package in a process of its own: one that crashes or hangs while it loads does not take us with it."""

import subprocess
import sys
from collections.abc import Callable

PROBE_SECONDS = 120.0
Probe = Callable[[str], tuple[bool, str]]  # code -> did it run, and what it printed or complained


def probe(code: str) -> tuple[bool, str]:
    """Run Python code; return whether it succeeded, and what it printed or its last complaint."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {PROBE_SECONDS:g} s"
    if done.returncode == 0:
        return True, done.stdout.strip()
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return False, said[-1].strip() if said else f"ended with exit code {done.returncode} and said nothing"
