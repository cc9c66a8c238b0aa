"""What carries our messages: gloo, in a process group of its own, or MPI beside torch's process group.

With `engine="mpi"` the process group stays what it is: torch needs it for buffers, and ranks agree on plans through it.
Gradients travel through MPI alone, from the first iteration on. Both must have been started with the same ranks, which
is compared before anything is sent.

Which thread calls MPI: measuring, the thread that trains; buckets, the communication threads; never both at a time. So
MPI must allow calls from any thread, one at a time (MPI_THREAD_SERIALIZED), and from several at once for more than one
bucket to be under way, or where the training script calls MPI itself. mpi4py asks for the latter (MPI_THREAD_MULTIPLE),
and Open MPI grants it.
"""

from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from penstock.errors import MismatchError, PlanError
from penstock.runtime import transport
from penstock.runtime.connect import REST_SECONDS, start_mpi
from penstock.runtime.executor import TIMEOUT_SECONDS
from penstock.runtime.transport import Transport, c10d
from penstock.runtime.transport.c10d import C10dTransport, group_timeout, notes_of
from penstock.runtime.transport.meeting import MARGIN_SECONDS, within
from penstock.torch.collective_errors import GroupRanks, together

MPI: Final = "mpi"


def check_engine(engine: str | None) -> None:
    """Refuse an unknown engine."""
    if engine not in (None, MPI):
        raise PlanError(f"no engine called {engine!r}; wanted {MPI!r}, or None for the process group's own")


def engine_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that moves memory of `device` in a group, which may have one for each kind of device."""
    backends = dict(item.split(":", 1) for item in dist.get_backend_config(group).split(","))
    return backends.get(device.type, dist.get_backend(group))


def own_transport(engine: str | None, group: dist.ProcessGroup) -> Transport:
    """Return what carries messages of ours that never meet the user's; every rank must call this at the same time."""
    if engine == MPI:
        return mpi_transport(group)
    ours = own_group(group)
    with together("making a process group", group):
        return C10dTransport(ours, parent=group)


def own_group(group: dist.ProcessGroup, ranks: list[int] | None = None, backend: str = "gloo") -> dist.ProcessGroup:
    """Return a new group of the same ranks, or of `ranks` of them, which must all call this; other ranks need not."""
    everyone = dist.get_process_group_ranks(group)
    is_local = len(everyone) < dist.get_world_size()
    found = new_group(ranks or everyone, group, group_timeout(group), backend, is_local)
    GroupRanks(group).gather(None, "making a process group")  # a rank may still wait for one that died: none goes on
    return found


def new_group(
    ranks: list[int], beside: dist.ProcessGroup, timeout: timedelta | None, backend: str = "gloo", is_local: bool = True
) -> dist.ProcessGroup:
    """Return a new group; notes are in that `beside` it. A `timeout` of None is torch's own, half an hour.

    Only its own ranks call this where it `is_local`. Where there are others, torch must be told: it would wait for
    them, or mistake a group of theirs for this one.
    """
    make = partial(dist.new_group, ranks, timeout=timeout, backend=backend, use_local_synchronization=is_local)
    seconds = (timeout or dist.default_pg_timeout).total_seconds() + MARGIN_SECONDS
    with together("making a process group", beside):
        found: dist.ProcessGroup = within(seconds, make, notes_of(beside).is_given_up)
    return found


def connect_devices(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Have NCCL connect the ranks of a group, where it moves memory of `device`; every rank must call this together.

    torch's wrapper would do so with its first message, and wait for ever for a rank that does not come.
    """
    group = group or dist.group.WORLD
    if group is None or device.type != "cuda" or engine_of(group, device) != "nccl" or dist.get_world_size(group) == 1:
        return
    if engine_of(group, torch.device("cpu")) == "gloo":
        GroupRanks(group).gather(None, "connecting GPUs")  # who has died by now is known at once
    seconds = (group_timeout(group) or dist.default_pg_timeout).total_seconds() + MARGIN_SECONDS
    with together("connecting GPUs", group):
        c10d.connect_devices(group, device, seconds, notes_of(group).is_given_up)


def device_messages_within(group: dist.ProcessGroup, timeout_seconds: float) -> Any:
    """Return messages of our own between the devices of a group's ranks, made together; None where NCCL carries none.

    Making them waits for all ranks, and is given up as other waits are.
    """
    if not torch.cuda.is_available():
        return None
    from penstock.runtime.device.messages import device_messages  # `device/` is for GPUs

    device = torch.cuda.current_device()
    c10d.watch_devices(group)

    def make() -> Any:
        with torch.cuda.device(device):  # which each thread has its own of
            found = device_messages(group, timeout_seconds)
            torch.cuda.synchronize()
            return found

    seconds = timeout_seconds + MARGIN_SECONDS
    with together("connecting GPUs", group):
        return transport.within(seconds, make, c10d.UNCONNECTED.format(seconds), notes_of(group).is_given_up)


def message_seconds(group: dist.ProcessGroup) -> float:
    """Return how long one message may keep a rank waiting: five minutes, or less where the group's calls have less."""
    timeout = group_timeout(group)
    return TIMEOUT_SECONDS if timeout is None else min(TIMEOUT_SECONDS, timeout.total_seconds())


def mpi_transport(group: dist.ProcessGroup) -> Transport:
    """Return MPI with the ranks of a process group; raise the same on every rank where the two do not agree."""
    with together("starting MPI", group):
        place = _place(group)
    found = GroupRanks(group).gather(place, "comparing ranks of MPI")
    if complaint := next(filter(None, (_complaint(rank, len(found), one) for rank, one in enumerate(found))), None):
        raise MismatchError(complaint)
    from penstock.runtime.transport.mpi import MpiTransport

    with together("making a communicator of MPI", group):
        is_vain = notes_of(group).is_given_up
        return MpiTransport(rest_seconds=REST_SECONDS, most_seconds=message_seconds(group), is_vain=is_vain)


def _place(group: dist.ProcessGroup) -> tuple[int, int, bool] | str:
    """Return this process's rank in MPI, how many there are, and whether any thread may call it; or why there is none.

    What goes wrong is said to all ranks: a rank that raised alone would leave the others waiting. A rank that does not
    come to MPI's start is no more asked.
    """
    try:
        start_mpi(message_seconds(group), notes_of(group).is_given_up)

        from penstock.runtime.transport.mpi import place_in_world

        return place_in_world()
    except ConnectionError:
        raise
    except Exception as error:  # not installed; or there is no MPI library for it to load, or it does not start
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _complaint(rank: int, world_size: int, found: tuple[int, int, bool] | str) -> str | None:
    """Say what is wrong with what a rank found; None where nothing is."""
    if isinstance(found, str):
        return f"engine 'mpi': rank {rank} has no mpi4py ({found}); `pip install 'penstock[mpi]'` on every host"
    theirs, size, any_thread = found
    if (theirs, size) != (rank, world_size):
        return (
            f"engine 'mpi': rank {rank} of {world_size} in the process group is rank {theirs} of {size} in MPI; "
            "start all workers by one mpirun, and give torch the ranks that it numbers"
        )
    if not any_thread:
        return f"engine 'mpi': MPI allows calls from one thread only on rank {rank}; wanted MPI_THREAD_SERIALIZED"
    return None


def end_mpi() -> None:
    """End MPI for this process, together with all others: for one that leaves without the interpreter's end."""
    from penstock.runtime.transport.mpi import shut_down

    shut_down()
