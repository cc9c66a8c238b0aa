"""A pool of two ranks that do one task after another, each under a time limit: a hang is an outcome, not a hang."""

import importlib
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
import unittest
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from spawn import PRELOAD

RANKS = 2
SECONDS = 90.0  # a task takes longer only where it hangs
GRACE_SECONDS = 10.0  # for the other rank, once one has failed


@dataclass(frozen=True)
class Outcome:
    """How a task ended."""

    kind: str  # pass, skip, fail, crash (a rank died), timeout
    says: str = ""  # the error or the reason


class Pool:
    """Ranks that are started when they are needed, and anew after a task that did not end well."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self.log = tempfile.NamedTemporaryFile(prefix="conformance", suffix=".log")  # noqa: SIM115  # what ranks print

    def run(self, task: str, *arguments: Any, seconds: float = SECONDS) -> Outcome:
        """Call `task(rank, folder, *arguments)`, named as module:function, on all ranks; the folder is theirs."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "port").write_text(str(_free_port()))
            if not self._processes:
                self._start()
            for pipe in self._pipes:
                pipe.send((task, folder, arguments, seconds))
            outcome = self._collect(seconds)
        if outcome.kind not in ("pass", "skip"):
            self.stop()
        return outcome

    def stop(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        for rank in range(RANKS):
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, theirs, self.log.name))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _collect(self, seconds: float) -> Outcome:
        waiting, outcomes, until = list(self._pipes), [], time.monotonic() + seconds
        while waiting:
            ready = wait(waiting, max(0.0, until - time.monotonic()))
            if not ready:
                outcomes.append(Outcome("timeout", f"{len(waiting)} ranks after {seconds:.0f} s"))
                break
            for pipe in ready:
                outcome = _received(pipe)
                outcomes.append(outcome)
                waiting.remove(pipe)
                if outcome.kind not in ("pass", "skip"):
                    until = min(until, time.monotonic() + GRACE_SECONDS)
        return _worst(outcomes)


def as_torchrun(rank: int, folder: Path) -> dict[str, str]:
    """Return the environment of a rank that torchrun started."""
    values = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (folder / "port").read_text(), "TORCHELASTIC_RUN_ID": "conformance",
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _received(pipe: Any) -> Outcome:
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return Outcome("crash", "a rank died")


def _worst(outcomes: list[Outcome]) -> Outcome:
    """A rank that fails explains one that died or waits."""
    return min(outcomes, key=lambda each: ("fail", "crash", "timeout", "skip", "pass").index(each.kind))


def _serve(rank: int, pipe: Connection, log: str) -> None:
    """Do tasks until the pool ends."""
    _quiet(log)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that torchrun started
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            task, folder, arguments, seconds = pipe.recv()
        except EOFError:
            return
        signal.alarm(round(seconds + GRACE_SECONDS))  # ends a rank that hangs where the pool is gone
        outcome = _done(task, rank, Path(folder), arguments)
        signal.alarm(0)
        pipe.send(outcome)


def _done(task: str, rank: int, folder: Path, arguments: tuple[Any, ...]) -> Outcome:
    module, _, function = task.partition(":")
    try:
        getattr(importlib.import_module(module), function)(rank, folder, *arguments)
    except unittest.SkipTest as reason:
        return Outcome("skip", str(reason))
    except BaseException as error:
        traceback.print_exc()
        return Outcome("fail", f"rank {rank}: {type(error).__name__}: {error}"[:4000])
    return Outcome("pass")


def _quiet(log: str) -> None:
    """What the tests print goes into a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
