"""Runs a function in several processes that form one gloo group: `spawn(4, function, argument)`."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOAD = ["torch.distributed", "numba", "penstock.runtime.communicator", "penstock.runtime.transport.c10d"]
PRELOAD += [
    "torch._dynamo",
    "penstock.torch.ddp",
    "penstock.codecs.sparse.published",
]  # torch imports the first with any optimizer


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    value: Any  # what the function returned, or the exception it raised; None where the process died
    exit_code: int | None


def spawn(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what each rank returned; raise what the first failing one raised."""
    results = [outcome.value for outcome in spawn_outcomes(world_size, function, *arguments)]
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def spawn_outcomes(
    world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 300.0
) -> list[Outcome]:
    """Call `function(rank, *arguments)` on every rank; no process outlives the call.

    The function must be importable by name: keep it in a module beside the test, not in the test's own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=_body, args=(rank, world_size, directory, pipes[rank][1], function, arguments))
            for rank in range(world_size)
        ]
        for process, (_, writer) in zip(processes, pipes, strict=True):
            process.start()
            writer.close()
        try:
            return [_outcome(process, reader, seconds) for process, (reader, _) in zip(processes, pipes, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _outcome(process: Any, reader: Connection, seconds: float) -> Outcome:
    value = None
    try:
        assert reader.poll(seconds), "a rank hangs"
        value = reader.recv()
    except EOFError:  # it died
        pass
    process.join(seconds)
    return Outcome(value, process.exitcode)


def _body(
    rank: int, world_size: int, directory: str, writer: Connection, function: Callable[..., Any], arguments: tuple[Any]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{Path(directory) / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        result = function(rank, *arguments)
    except Exception as error:
        result = RuntimeError(f"{type(error).__name__}: {error}") if not _pickles(error) else error
    writer.send(result)
    writer.close()
    os._exit(0)  # after a failure gloo's own shutdown may wait for ranks that are gone


def _pickles(error: Exception) -> bool:
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
