"""What each process of a gloo test does; in a module of its own so that `spawn` can import it."""

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from every_call import sparse_calls
from penstock.codecs.registry import make_codec
from penstock.codecs.sparse.sparse_codec import SparseCodec
from penstock.errors import MismatchError, TransportError
from penstock.runtime import Communicator, failure_diagnosis
from penstock.runtime.transport.c10d import C10dTransport
from runtime.oracle import random_tensors
from runtime.suicidal import Suicidal
from runtime.threads import run_ranks


def as_torch(tensor: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(tensor.view(np.uint8)).view(getattr(torch, dtype))


def run_cases(rank: int, cases: list[tuple[str, str, int, str, int]]) -> list[np.ndarray]:
    """Return the result of each (operation, strategy, numel, dtype, root)."""
    communicator = Communicator(C10dTransport(), timeout_seconds=120)
    results = []
    for operation, strategy, numel, dtype, root in cases:
        tensor = random_tensors(communicator.transport.world_size, numel, dtype)[rank]
        where = {"root": root} if operation in ("broadcast", "reduce") else {}
        getattr(communicator, operation)(as_torch(tensor, dtype), strategy=strategy, **where)
        results.append(tensor)
    return results


def run_on_a_subgroup(rank: int) -> list[float]:
    """Ranks 1 and 2 of three add among themselves."""
    group = dist.new_group([1, 2])
    tensor = torch.full((5,), float(rank))
    if rank:
        Communicator(C10dTransport(group), timeout_seconds=120).all_reduce(tensor)
    return tensor.tolist()


def disagree_about_size(rank: int) -> str:
    try:
        Communicator(C10dTransport(), timeout_seconds=120).all_reduce(torch.ones(10 + rank // 2))
    except MismatchError as error:
        return str(error)
    return "no error"


def make_different_known_calls(rank: int) -> str:
    """Compare two kinds of call, then let rank 1 make the other one; gloo alone would abort the process."""
    communicator = Communicator(C10dTransport(), timeout_seconds=120)
    for numel in (1000, 2000):
        communicator.all_reduce(torch.ones(numel))
    failure_diagnosis.SHARE = (
        0.5  # of the timeout for notes: ranks on a busy machine do not run into it at the same moment
    )
    communicator.timeout_seconds = 4
    dist.barrier()
    tensor = torch.ones(1000 if rank == 1 else 2000)
    try:
        communicator.all_reduce(tensor)
    except TransportError as error:
        assert torch.all(tensor == 1)
        return str(error)
    return "no error"


def survive_the_death_of(
    rank: int, victim: int, actions: int, strategy: str, numel: int, timeout_seconds: float, codec: str = ""
) -> tuple[str, list[str]]:
    """Run all-reduces while `victim` kills itself before its `actions`-th message; return how we failed."""
    tensor = torch.ones(numel)
    compression: dict[str, Any] = {"codec": make_codec(codec), "residual": torch.zeros(numel)} if codec else {}
    options = {"strategy": strategy, "block_numel": max(1, numel // 10), **compression}
    run_ranks(2, lambda alone: Communicator(alone).all_reduce(tensor.clone(), **options))  # kernels compiled or loaded
    transport: Any = C10dTransport()
    if rank == victim:
        transport = Suicidal(transport, actions)
    communicator = Communicator(transport, timeout_seconds)
    read_notes_for_half_a_second(timeout_seconds)
    dist.barrier()
    message = failure_of(lambda: [communicator.all_reduce(tensor, **options) for _ in range(1000)])
    return message, [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]


def survive_the_absence_of(rank: int, absent: int, timeout_seconds: float, stops: bool = False) -> str:
    """Run one all-reduce that `absent` takes part in, then one it is away from, or stopped for, until all have failed.

    Half of the timeout is for notes: on a busy machine ranks notice at different moments.
    """
    communicator = Communicator(C10dTransport(), timeout_seconds=120)
    tensor = torch.ones(1000)
    communicator.all_reduce(tensor)
    communicator.timeout_seconds, failure_diagnosis.SHARE, failure_diagnosis.LONGEST_SECONDS = (
        timeout_seconds,
        0.5,
        60.0,
    )
    others = [other for other in range(dist.get_world_size()) if other != absent]
    store, mine = C10dTransport().store, os.getpid()
    store.set(f"pid {rank}", str(mine))
    dist.barrier()
    if rank == absent:
        if stops:
            os.kill(mine, signal.SIGSTOP)
        store.wait([f"failed {other}" for other in others], timedelta(seconds=200))
        return "was away"
    message = failure_of(lambda: communicator.all_reduce(tensor))
    store.set(f"failed {rank}", "")
    if stops and rank == others[0]:
        store.wait([f"failed {other}" for other in others], timedelta(seconds=200))
        os.kill(int(store.get(f"pid {absent}")), signal.SIGCONT)
    return message


def survive_the_error_of(rank: int, victim: int, strategy: str, timeout_seconds: float) -> str:
    """Run all-reduces until `victim` raises something of its own and ends."""
    communicator = Communicator(C10dTransport(), timeout_seconds)
    tensor = torch.ones(1000)
    communicator.all_reduce(tensor, strategy=strategy)
    read_notes_for_half_a_second(timeout_seconds)
    dist.barrier()
    if rank == victim:
        raise ValueError("a mistake of this rank alone")
    return failure_of(lambda: [communicator.all_reduce(tensor, strategy=strategy) for _ in range(1000)])


def read_notes_for_half_a_second(timeout_seconds: float) -> None:
    """Whoever hangs up has left its note before, so it need not be waited for."""
    failure_diagnosis.SHARE = 0.5 / timeout_seconds


def failure_of(call: Callable[[], object]) -> str:
    try:
        call()
    except TransportError as error:
        return str(error)
    return "no error"


def reduce_on_the_device(rank: int, numel: int) -> np.ndarray:
    """All-reduce a CUDA tensor over gloo, twice, and return the first result."""
    communicator = Communicator(C10dTransport(), timeout_seconds=120)
    results = []
    for _ in range(2):
        tensor = torch.from_numpy(random_tensors(communicator.transport.world_size, numel, "float32")[rank]).cuda()
        communicator.all_reduce(tensor)
        results.append(tensor.cpu().numpy())
    assert results[0].tobytes() == results[1].tobytes()
    return results[0]


def reduce_sparsely(rank: int, gradients: np.ndarray, density: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """All-reduce every step's gradients by every sparse strategy; return what was applied, and what this rank keeps."""
    communicator = Communicator(C10dTransport(), timeout_seconds=120)
    found = {}
    for _, strategy in sparse_calls():
        residual, applied = np.zeros(gradients.shape[2], np.float32), []
        for step in gradients:
            data = step[rank].copy()
            communicator.all_reduce(data, strategy, codec=SparseCodec(density), residual=residual)
            applied.append(data)
        found[strategy] = np.array(applied), residual
    return found
