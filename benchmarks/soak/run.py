"""Hostile conditions, one kind after the other: what `make soak` runs, for hours.

Each script of this folder writes `benchmarks/results/soak-NAME.json`, says what was run and what was not good, and
exits with 1 where something was not; `kills` and `damage` go on from their records when they are started again.
`python benchmarks/soak/run.py kills` runs only that one. A script that fails does not stop the others. Kills over NCCL
want a GPU: `python benchmarks/soak/kills.py --engines nccl --cases 24`.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPTS = ("kills", "damage", "links", "elastic", "iterations")  # in this order


def main(wanted: Sequence[str]) -> int:
    """Run the scripts of these names, or all; return the exit code."""
    failed = []
    for name in wanted or SCRIPTS:
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py"))]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
