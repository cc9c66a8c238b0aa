"""Runs one worker script per framework on several ranks, and what all of them average: equal bits are compared.

A worker is a script beside this file, started by `run_workers(world_size, "worker_tensorflow.py", ...)` as torchrun
would start it (gloo), or by mpirun. It prints one line of JSON. Frameworks take seconds to import, so one start does
all checks of a file.

`CASES` are averaged by each framework from the same numbers: `gradients(rank, step)` go in, `digest(averages)` of what
comes out must be the same everywhere. After step 0 each worker asks for the state of its exchange: torch changes its
buckets then, which settles feedback that codecs have put off, as asking does; without it sums differ in the last bit.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from penstock.plan import Bucket, Plan

HERE = Path(__file__).parent
SHAPES = {"first/kernel": (17, 40), "first/bias": (40,), "second/kernel": (40, 10), "second/bias": (10,)}
STEPS = 4
_DENSE = {"dense ring": {"strategy": "ring", "codec": None}}
_CODED = {
    "onebit": {"strategy": "ring", "codec": "onebit"},
    "gtopk": {"strategy": "gtopk_doubling", "codec": "sparse(density=0.05)"},
}
# How every bucket travels. Without numba, as a machine with a GPU may be, there is no codec in host memory.
CASES: dict[str, dict[str, Any]] = _DENSE | (_CODED if find_spec("numba") else {})
BUCKETS = (("second/bias", "second/kernel"), ("first/bias", "first/kernel"))  # as backward passes go


def plan_of(case: str, workers: int) -> Plan:
    """Return the plan by which all frameworks send."""
    route = CASES[case]
    sizes = {name: 4 * int(np.prod(shape)) for name, shape in SHAPES.items()}
    made = (Bucket(names, sum(sizes[name] for name in names), route["strategy"], route["codec"]) for names in BUCKETS)
    return Plan("equal bits", workers, "exact", tuple(made))


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    """Return this rank's gradients of a step; sums of them round."""
    generator = np.random.default_rng([rank, step])
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def digest(averages: dict[str, np.ndarray]) -> str:
    """Return what tells the averages of a step apart, to the bit."""
    whole = hashlib.sha256()
    for name, shape in SHAPES.items():
        values = np.ascontiguousarray(averages[name])
        assert values.shape == shape
        assert values.dtype == np.float32
        whole.update(values.tobytes())
    return whole.hexdigest()[:16]


def run_workers(world_size: int, script: str, *arguments: str, seconds: float = 240, engine: str = "gloo") -> list[Any]:
    """Return what each rank of a worker script printed as JSON, None where it printed none; no process is left."""
    return [found for found, _, _ in worker_outcomes(world_size, script, *arguments, seconds=seconds, engine=engine)]


def worker_outcomes(
    world_size: int, script: str, *arguments: str, seconds: float = 240, engine: str = "gloo"
) -> list[tuple[Any, int, str]]:
    """Return of each rank what it printed as JSON (None: nothing), its exit code and its stderr."""
    command = [sys.executable, str(HERE / script), *arguments]
    if engine == "mpi":
        return _under_mpirun(world_size, command, seconds)
    port = str(_free_port())
    started = [
        subprocess.Popen(
            command, env=_environment(rank, world_size, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world_size)
    ]
    try:
        ended = [(process, *process.communicate(timeout=seconds)) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(_parsed(out, err, process.returncode), process.returncode, err) for process, out, err in ended]


def _under_mpirun(world_size: int, command: Sequence[str], seconds: float) -> list[tuple[Any, int, str]]:
    mpirun = Path(sys.executable).parent / "mpirun"
    options = ["--allow-run-as-root", "--oversubscribe", "-n", str(world_size)]
    done = subprocess.run(
        [str(mpirun), *options, *command],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=quiet(dict(os.environ)),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [(each, 0, done.stderr) for each in sorted(lines, key=lambda found: found["rank"])]


def _parsed(out: str, err: str, code: int) -> Any:
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert lines or code, err[-3000:]
    return json.loads(lines[-1]) if lines else None


def _environment(rank: int, world_size: int, port: str) -> dict[str, str]:
    return quiet(os.environ) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def quiet(environment: Any) -> dict[str, str]:
    """Return the variables of a worker: this tree first, one thread, only errors of the framework's."""
    paths = [str(HERE.parents[1] / "src"), str(HERE.parent), environment.get("PYTHONPATH", "")]
    return dict(environment) | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def report(rank: int, **found: Any) -> None:
    """Print what a rank found, for `run_workers`; in one write, since lines of ranks may share a pipe."""
    sys.stdout.write(json.dumps({"rank": rank, **found}) + "\n")
    sys.stdout.flush()
