"""Ranks of which one is killed, or gives up, while torch does something for us."""

import json
import os
import pickle
import signal
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed.device_mesh import init_device_mesh

from penstock.errors import FormatError, PlanError, TransportError
from penstock.plan import Bucket, Plan, Route
from penstock.runtime.failure_diagnosis import Note
from penstock.runtime.transport import c10d
from penstock.runtime.transport.c10d import C10dTransport, group_timeout, join_gloo
from penstock.torch import DistributedDataParallel, ParameterServers, comm_hook, ddp, hook, wrapper_planning
from penstock.torch.checkpoint import Loads
from penstock.torch.collective_errors import GroupRanks
from penstock.torch.engines import message_seconds, own_group
from penstock.torch.fsdp.sharding import _all_ranks
from penstock.torch.wrapper_planning import WrapperPlanning


def survive(rank: int, victim: int, phase: str) -> str:
    """Return what the wrapper raised when `victim` was killed before it was made, or before a later step."""
    model = torch.nn.Linear(4, 4)
    dist.barrier()
    try:
        if phase == "construction":
            _die(rank == victim)
            DistributedDataParallel(model)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(*comm_hook("native"))
        for step in range(100):
            _die(rank == victim and step == 3)
            wrapped(torch.ones(2, 4)).sum().backward()
    except TransportError as error:
        return str(error)
    return "no error"


def survive_before_a_plan(rank: int, victim: int, phase: str) -> str:
    """Return what our wrapper raised when `victim` was killed in a phase before there is a plan."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4), strategy="native", profile_iterations=4, measurements=False)
    if rank == victim and phase == "measuring":
        WrapperPlanning._survey = lambda *_: _die(True)
    step = {"averaging a bucket": 2, "sharing buckets": 1}.get(phase, 100)
    try:
        for number in range(100):
            _die(rank == victim and number == step and phase == "sharing buckets")
            output = model(torch.ones(2, 4))
            _die(rank == victim and number == step)
            output.sum().backward()
    except TransportError as error:
        return str(error)
    return "no error"


class _AbortedNccl:
    """Stands in for NCCL under torch's watchdog: a lost peer is no error of a message, which ends with other data."""

    def __init__(self) -> None:
        self.error, self.aborted, self.all_reduce = ErrorType.SUCCESS, False, dist.all_reduce

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        self.aborted = True

    def average(self, values: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False) -> Any:
        """Sum over gloo; where a rank is gone, raise nothing the first time, and then as an aborted communicator."""
        if self.error != ErrorType.SUCCESS:
            raise dist.DistBackendError("NCCL communicator was aborted on rank 0")
        try:
            self.all_reduce(values, group=group)
        except RuntimeError:
            values.fill_(float("nan"))
            self.error = ErrorType.COMM_ERROR
        done = torch.futures.Future[list[torch.Tensor]]()
        done.set_result([values])
        return SimpleNamespace(get_future=lambda: done)


def survive_nccl(rank: int, victim: int, when: str) -> tuple[str, bool]:
    """Return what a survivor raised whose engine says nothing of a lost rank by itself, and whether it was aborted.

    when: the watchdog knows at the end of the backward pass, or by the next forward pass, or even later.
    """
    nccl = _AbortedNccl()
    c10d._nccl_backends = lambda _group: iter([nccl])
    hook.dist = SimpleNamespace(**vars(dist) | {"all_reduce": nccl.average})
    if when != "backward":
        hook.raise_device_failure = lambda *_: None
    if when == "later":
        wrapper_planning.raise_device_failure = lambda *_: None
        ddp.together = lambda *_: nullcontext()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Linear(4, 4), strategy="native", planner="single", profile_iterations=2, measurements=False
    )
    try:
        for step in range(100):
            loss = model(torch.ones(2, 4)).sum()
            _die(rank == victim and step == 12)
            loss.backward()
    except TransportError as error:
        return str(error), nccl.aborted
    return "no error", nccl.aborted


def make_a_group_while_another_gives_up(rank: int) -> str:
    """Return what rank 0 raised, whose group can never be made: rank 1 leaves a note, and stays."""
    parent = dist.new_group(timeout=timedelta(minutes=10))
    if rank == 1:
        C10dTransport(parent).leave_note(json.dumps(asdict(Note(0, "a collective of torch's own"))))
        dist.barrier()
        return ""
    try:
        own_group(parent)
    except TransportError as error:
        dist.barrier()
        return str(error)
    return "no error"


def keep_the_store(rank: int) -> bool:
    """Return on rank 0 whether rank 1 had read its notes when rank 0 went on."""
    transport = C10dTransport()
    if rank == 1:
        transport.store.wait(["reading"])
        transport.store.set("about to have read", "")
    else:
        transport.store.set("reading", "")
    transport.finish_reading([1 - rank], 60.0)
    return bool(transport.store.check(["about to have read"]))


def tell_a_store_that_is_gone(rank: int, monkeypatched_seconds: float) -> str:
    """Return what a rank says whose store went away before a backward pass."""
    from penstock.runtime import failure_diagnosis

    failure_diagnosis.LONGEST_SECONDS = monkeypatched_seconds
    dist.barrier()  # a rank that ended while another connects would be that one's error
    loads = Loads(None, "token")
    vars(loads)["_store"] = _Gone()
    try:
        loads.went_on()
    except TransportError as error:
        return str(error)
    return "no error"


class _Gone:
    """A store whose process has ended."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Connection reset by peer")


def seconds_of_messages(rank: int) -> list[float]:
    """Return how long messages wait beside a group of three seconds, and beside one of half an hour."""
    return [message_seconds(dist.new_group(timeout=timedelta(seconds=each))) for each in (3, 1800)]


def seconds_of_groups(rank: int) -> list[float]:
    """Return the timeouts of groups that we make beside the default one: of adaptors, of a mesh, of servers."""
    connect, _ = join_gloo()
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("stage", "replicate", "shard"))["replicate", "shard"]
    groups = [connect()._group, ParameterServers(1).transport._group, _all_ranks(mesh)]
    return [group_timeout(each).total_seconds() for each in groups]


def _die(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


def hear_from_a_rank_that_pickles(rank, folder):
    """Gather a value where rank 1 sends a pickle that makes a folder; return what was raised."""
    ranks = GroupRanks(None)
    try:
        if rank == 1:
            ranks.gather_bytes(pickle.dumps(Planted(folder)), "comparing")
        else:
            ranks.gather("a value", "comparing")
    except FormatError as error:
        return str(error)


class Planted:
    """Unpickling it makes a folder."""

    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


def tell_each_other(rank):
    """Gather values of many kinds, and hear from rank 0 what it can tell and what it cannot."""
    ranks = GroupRanks(None)
    mine = (rank, "text" * rank, Route("ring", "onebit"), {"key": [1.5, None, b"\0"]})
    held = ranks.gather(mine, "comparing")
    told = ranks.from_first(
        Plan("m", 2, "exact", (Bucket(("a",), 4, "ring"),)) if rank == 0 else None, "sharing the plan"
    )
    try:
        ranks.from_first(object() if rank == 0 else None, "sharing the plan")
    except PlanError as error:
        return held, told, str(error)
