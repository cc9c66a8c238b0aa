"""Runs a function in several processes that form one gloo group: `spawn(4, function, argument)`."""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import sleep
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


SHOW_STACKS = signal.SIGUSR2


def spawn(world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 300.0) -> list[Any]:
    """Return what each rank returned; raise what the first failing one raised."""
    results = [outcome.value for outcome in spawn_outcomes(world_size, function, *arguments, seconds=seconds)]
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def spawn_outcomes(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = 300.0,
    timeout: float | None = None,
    stopped: int | None = None,
) -> list[Outcome]:
    """Call `function(rank, *arguments)` on every rank; no process outlives the call.

    After `seconds` a rank is taken to hang, and the error says where all threads of all ranks are. The group has a
    `timeout` in seconds, or torch's. The rank `stopped` stops itself: it is killed once all others have ended.
    The function must be importable by name: keep it in a module beside the test, not in the test's own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_body, args=(rank, world_size, directory, pipes[rank][1], function, arguments, timeout)
            )
            for rank in range(world_size)
        ]
        for process, (_, writer) in zip(processes, pipes, strict=True):
            process.start()
            writer.close()
        try:
            found = dict[int, Outcome]()
            for rank in sorted(range(world_size), key=lambda each: each == stopped):
                if rank == stopped:
                    processes[rank].kill()
                found[rank] = _outcome(processes[rank], pipes[rank][0], seconds)
            return [found[rank] for rank in range(world_size)]
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{_stacks(processes, directory)}") from None
        finally:
            for process in processes:
                process.kill()
                process.join()


def _outcome(process: Any, reader: Connection, seconds: float) -> Outcome:
    value = None
    try:
        if not reader.poll(seconds):
            raise TimeoutError(f"a rank hangs: nothing came of it in {seconds:g} s")
        value = reader.recv()
    except EOFError:  # it died
        pass
    process.join(seconds)
    return Outcome(value, process.exitcode)


def _stacks(processes: list[Any], directory: str) -> str:
    """Return where each thread of the ranks that live is."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, SHOW_STACKS)
    sleep(1.0)
    files = sorted(Path(directory).glob("stacks-*"))
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in files if path.stat().st_size)


def _body(
    rank: int,
    world_size: int,
    directory: str,
    writer: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any],
    timeout: float | None,
) -> None:
    import torch
    import torch.distributed as dist

    stacks = open(Path(directory) / f"stacks-{rank}", "w")  # noqa: SIM115  # open as long as the process lives
    faulthandler.register(SHOW_STACKS, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{Path(directory) / 'store'}"
    limit = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, **limit)
    dist.barrier()  # a function that returns at once would end this rank while others still connect to it
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
