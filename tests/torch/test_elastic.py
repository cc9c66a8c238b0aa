"""The recipe for ranks that come and go, `examples/train_elastic.py`, under torchrun's elastic launch."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from time import monotonic, sleep

import pytest

import torch_elastic
from penstock.cluster.processes import free_port
from torch_elastic import SAVE_EVERY

PATIENCE_SECONDS = 400.0
CONF = "last_call_timeout=20,keep_alive_interval=2,keep_alive_max_attempt=10"  # a busy machine answers late


class Agents:
    """The launchers of one job, a host each, as far as torchrun knows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.running = folder, free_port(), dict[int, subprocess.Popen[bytes]]()

    def start(self, number: int) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3", "--nproc-per-node", "1"]
        command += ["--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        command += ["--rdzv-id", "elastic", "--rdzv-conf", f"{CONF},is_host={int(number == 0)}"]
        log = open(self.folder / f"agent-{number}.log", "ab")  # noqa: SIM115  # the child's
        self.running[number] = subprocess.Popen(
            [*command, torch_elastic.__file__, str(self.folder)],
            stdout=log,
            stderr=log,
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # as docs/elastic.md says
        )
        log.close()

    def kill(self, number: int) -> None:
        """End a launcher and its rank at once, as a host that loses its power."""
        agent = self.running.pop(number)
        if agent.poll() is None:
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            for pid in (agent.pid, *map(int, children)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        agent.wait()

    def notes(self) -> list[dict[str, object]]:
        path = self.folder / "notes.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_save(self, world_size: int, after: int) -> int:
        """Return the step of a checkpoint that so many ranks wrote after the first `after` notes."""
        until = monotonic() + PATIENCE_SECONDS
        while monotonic() < until:
            for each in self.notes()[after:]:
                if each["event"] == "save" and each["world_size"] == world_size:
                    return int(str(each["step"]))
            assert all(agent.poll() is None for agent in self.running.values()), self.said()
            sleep(0.2)
        raise AssertionError(f"no checkpoint of {world_size} ranks: {self.said()}")

    def said(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("agent-*.log")))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path)
    yield made
    for number in list(made.running):
        made.kill(number)


@pytest.mark.slow
def test_ranks_that_die_and_come_back_lose_steps_and_no_residual(agents: Agents) -> None:
    for number in range(3):
        agents.start(number)
    agents.wait_for_save(3, 0)
    seen = len(agents.notes())
    agents.kill(2)
    agents.wait_for_save(2, seen)
    seen = len(agents.notes())
    agents.start(2)
    agents.wait_for_save(3, seen)
    for agent in agents.running.values():
        assert agent.wait(PATIENCE_SECONDS) == 0, agents.said()
    notes = agents.notes()
    loads, saves = ([each for each in notes if each["event"] == event] for event in ("load", "save"))
    assert [size for size, _ in groupby(each["world_size"] for each in saves)] == [3, 2, 3]
    saved = 0
    for each in notes:  # the step count goes on from the newest checkpoint; rank 0 may have ended before it noted that
        step = int(str(each["step"]))
        assert step - saved in ((0, SAVE_EVERY) if each["event"] == "load" else (SAVE_EVERY,))
        saved = step
    for each in loads[1:]:  # by element; sums of float32 residuals are rounded
        assert each["lost"] <= 1e-6 * each["mass"]
    assert loads[-1]["mass"] > 0
    first, last = (sum(each["losses"]) / len(each["losses"]) for each in (saves[0], saves[-1]))
    assert last < 0.75 * first
