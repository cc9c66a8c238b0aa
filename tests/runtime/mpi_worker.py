"""What each rank of an MPI test does: `mpirun ... python mpi_worker.py CASE`. Rank 0 prints `ok` when all is well."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from every_call import dense_calls
from penstock.errors import MismatchError, StrategyError, TransportError
from penstock.runtime import Communicator
from penstock.runtime.transport import mpi
from penstock.runtime.transport.mpi import SEGMENT_NBYTES, MpiTransport
from penstock.runtime.views import DTYPES
from runtime.oracle import check, random_tensors
from runtime.suicidal import Suicidal

WORLD = MPI.COMM_WORLD


def strategies() -> None:
    """Every strategy, with sizes around the world size, of one segment and of many; every element type."""
    transport = MpiTransport()
    cases = [
        (o, s, n, "float32") for o, s in sorted(dense_calls()) for n in (0, 1, WORLD.size, SEGMENT_NBYTES // 4 + 1)
    ]
    cases += [("all_reduce", "ring", 1001, dtype) for dtype in DTYPES if dtype != "bfloat16"]
    run_cases(transport, cases)


def far_hosts() -> None:
    """The way of messages between hosts: in segments."""
    transport = MpiTransport()
    transport._near = frozenset()
    run_cases(transport, [(o, s, n, "float32") for o, s in sorted(dense_calls()) for n in (1, 200_003)])


def run_cases(transport: MpiTransport, cases: list[tuple[str, str, int, str]]) -> None:
    communicator = Communicator(transport, timeout_seconds=120)
    for operation, strategy, numel, dtype in cases:
        root = WORLD.size - 1
        inputs = random_tensors(WORLD.size, numel, dtype)
        output = inputs[WORLD.rank].copy()
        where = {"root": root} if operation in ("broadcast", "reduce") else {}
        getattr(communicator, operation)(output, strategy=strategy, **where)
        check(operation, inputs, WORLD.allgather(output), dtype, root)


def torch_tensor() -> None:
    """A bfloat16 tensor of torch."""
    import torch

    tensor = torch.full((1000,), 1.5, dtype=torch.bfloat16)
    Communicator(MpiTransport(), timeout_seconds=120).all_reduce(tensor)
    assert torch.all(tensor == 1.5 * WORLD.size)


def mismatch() -> None:
    """Ranks that disagree are told."""
    if WORLD.size < 3:
        return
    with pytest.raises(MismatchError, match="numel is 11 on rank 2 and 10 on rank 0"):
        Communicator(MpiTransport(), timeout_seconds=120).all_reduce(np.ones(10 + min(WORLD.rank // 2, 1)))


def absence() -> None:
    """A rank that sleeps through a call is noticed within the timeout, and named by whoever waits for it."""
    communicator = Communicator(MpiTransport(), timeout_seconds=120)
    communicator.all_reduce(np.ones(10))
    communicator.timeout_seconds = 1
    if WORLD.rank != 1:
        with pytest.raises(TransportError) as caught:
            communicator.all_reduce(np.ones(10))
        assert WORLD.rank != 2 or caught.value.peer == 1  # it goes on to the barrier below


def native_lacks() -> None:
    """MPI has no half precision of its own."""
    with pytest.raises(StrategyError, match="native on MPI: no float16"):
        Communicator(MpiTransport(), timeout_seconds=5).all_reduce(np.ones(4, np.float16), strategy="native")


def disagreement() -> None:
    """Two kinds of call that were compared before, each made by some ranks: all are told which."""
    communicator = Communicator(MpiTransport(), timeout_seconds=120)
    for numel in (10, 20):
        communicator.all_reduce(np.ones(numel))
    communicator.timeout_seconds = 20  # so that notes are waited for for 2 seconds
    WORLD.Barrier()
    mine, theirs = (10, 20) if WORLD.rank == 1 else (20, 10)
    with pytest.raises(
        TransportError, match=f"is in call 3, all_reduce by ring of {theirs} float64 .*this rank"
    ) as caught:
        communicator.all_reduce(np.ones(mine))
    assert f"this rank is in call 3, all_reduce by ring of {mine} float64" in str(caught.value)


def bereavement() -> None:
    """A rank is killed at a random message while others go on; under ULFM they are told at once, by name."""
    rng = random.Random(int(sys.argv[2]))
    strategy, victim, messages = rng.choice(["ring", "linear_pipeline"]), rng.randrange(WORLD.size), rng.randrange(40)
    transport: Any = MpiTransport()
    if WORLD.rank == victim:
        transport = Suicidal(transport, messages)
    communicator = Communicator(transport, timeout_seconds=60)
    with pytest.raises(TransportError, match=f": rank {victim} died") as caught:
        reduce_often(communicator, strategy)  # after the timeout it says `nothing for 60 s`
    assert str(caught.value).startswith(f"{strategy}: rank {WORLD.rank}, step ")


def departure() -> None:
    """Rank 1 is silent, rank 2 gives up and leaves; rank 0, which is more patient, does not take it for the cause."""
    communicator = Communicator(MpiTransport(), timeout_seconds=2 if WORLD.rank == 2 else 60)
    communicator.all_reduce(np.ones(10), strategy="native")
    if WORLD.rank == 1:
        time.sleep(20)
        return
    with pytest.raises(TransportError, match=r"rank 1 did not answer|cannot be told") as caught:
        communicator.all_reduce(np.ones(10), strategy="native")
    assert "rank 2 died" not in str(caught.value)


def reduce_often(communicator: Communicator, strategy: str) -> None:
    for _ in range(1000):
        communicator.all_reduce(np.ones(1000), strategy=strategy, block_numel=100)


def death() -> None:
    """A rank is killed between two calls."""
    communicator = Communicator(MpiTransport(), timeout_seconds=1000)
    communicator.all_reduce(np.ones(10))
    if WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.all_reduce(np.ones(10))


def notes() -> None:
    """What a rank leaves word of in one lane is read by the others in theirs."""
    transport = MpiTransport()
    first, second = transport.lane(1), transport.lane(2)
    assert first is not None
    assert second is not None
    first.leave_note(f"from {WORLD.rank}")
    for peer in {*range(WORLD.size)} - {WORLD.rank}:
        assert second.read_note(peer, 60) == f"from {peer}"


def closing() -> None:
    """A closed transport's copy is used again; the communicator it was made of stays what it was."""
    handles = set()
    for _ in range(20):
        transport = MpiTransport()
        Communicator(transport, timeout_seconds=120).all_reduce(np.ones(10))
        handles.add(transport._comm.py2f())
        transport.close()
        transport.close()
    assert len(handles) == 1, f"{len(handles)} communicators for 20 transports, one at a time"
    assert WORLD.allreduce(1) == WORLD.size
    ours = WORLD.Dup()
    transport = MpiTransport(ours)
    Communicator(transport, timeout_seconds=120).all_reduce(np.ones(10))
    transport.close()
    transport.close()
    assert ours.allreduce(1) == ours.size


def few_copies() -> None:
    """Measuring beside a wrapper that has a transport, and adopting a plan, make no communicator any more."""
    made = []
    make = mpi._copies
    mpi._copies = lambda given, count: made.append(count) or make(given, count)
    wrapper = MpiTransport()
    for _ in range(3):
        measuring = MpiTransport()
        assert measuring._comm != wrapper._comm
        first, second = np.full(10, 1.0), np.full(10, 2.0)
        Communicator(measuring, timeout_seconds=120).all_reduce(first)
        Communicator(wrapper, timeout_seconds=120).all_reduce(second)
        assert (first[0], second[0]) == (WORLD.size, 2 * WORLD.size)
        measuring.close()
        wrapper.close()
        wrapper = MpiTransport()
    wrapper.close()
    assert made == [2]


def everything() -> None:
    """All that leaves MPI in order, in one start of Python."""
    for case in (few_copies, strategies, far_hosts, torch_tensor, mismatch, native_lacks, notes, closing):
        case()


CASES: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (everything, absence, disagreement, bereavement, departure, death)
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
    print(f"ok {WORLD.rank}", flush=True)
    if sys.argv[1] in ("absence", "disagreement"):
        WORLD.Barrier()  # mpirun ends all others when one leaves as below, unless it was told to go on
    if sys.argv[1] in ("absence", "disagreement", "bereavement", "departure"):
        os._exit(0)  # MPI's own shutdown would wait for messages that never come
