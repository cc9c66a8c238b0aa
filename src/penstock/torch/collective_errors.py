"""Turns a failed torch collective into a `TransportError` that names the rank which is gone.

gloo's own error has an address and no rank. A rank that gets one leaves a note and reads the others', as after a
message of ours (`runtime/failure_diagnosis.py`).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import FormatError, PlanError, TransportError, one_line
from penstock.planning.agree import MOST_NBYTES, pack, unpack_whole
from penstock.runtime.executor import TIMEOUT_SECONDS
from penstock.runtime.failure_diagnosis import Note, explained
from penstock.runtime.transport.c10d import C10dTransport, device_failure, named, notes_of

# In what gloo says of connections, mostly with the name of its file, and a FileStore.
_SIGNS = re.compile("gloo/transport|pair closure|^wait timeout", re.IGNORECASE)
# Of the store, in which ranks meet before they are connected, and of NCCL.
_LOST = (dist.DistStoreError, dist.DistNetworkError, dist.DistBackendError)


class GroupRanks:
    """The ranks of a process group, as planning talks to them (`planning/agree.py`); nothing is pickled."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return every rank's value, by rank; raise `FormatError` where a rank sent none of ours."""
        held = self.gather_bytes(b"".join(pack(value)), what)
        return [unpack_whole(each, f"message of rank {rank} ({what})") for rank, each in enumerate(held)]

    def gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Return every rank's bytes, by rank."""
        with together(what, self._group):
            mine, size = self._tensor(data), dist.get_world_size(self._group)
            sizes = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(size)]
            dist.all_gather(sizes, torch.tensor([len(data)], device=mine.device), group=self._group)
            nbytes = [_checked_nbytes(int(each), rank, what) for rank, each in enumerate(sizes)]
            room = torch.zeros(max(nbytes), dtype=torch.uint8, device=mine.device)
            room[: len(data)] = mine
            held = [torch.empty_like(room) for _ in range(size)]
            dist.all_gather(held, room, group=self._group)
            return [each[:length].cpu().numpy().tobytes() for each, length in zip(held, nbytes, strict=True)]

    def from_first(self, value: Any, what: str) -> Any:
        """Return rank 0's value; raise `PlanError` on all ranks where no message can hold it."""
        complaint, data = "", b""
        if self.rank == 0:
            try:
                data = b"".join(pack(("", value)))
            except PlanError as error:
                data = b"".join(pack((str(error), None)))
        with together(what, self._group):
            mine = self._tensor(data)
            size = torch.tensor([len(data)], device=mine.device)
            dist.broadcast(size, group=self._group, group_src=0)
            room = mine if self.rank == 0 else mine.new_zeros(_checked_nbytes(int(size), 0, what))
            dist.broadcast(room, group=self._group, group_src=0)
            data = room.cpu().numpy().tobytes()
        complaint, told = unpack_whole(data, f"message of rank 0 ({what})")
        if complaint:
            raise PlanError(complaint)
        return value if self.rank == 0 else told

    def _tensor(self, data: bytes) -> torch.Tensor:
        """Return bytes in memory that the group's backend moves: the host's where it can."""
        group = self._group or dist.group.WORLD
        kinds = {each.type for each in group._device_types}  # type: ignore[union-attr]  # the group has a rank
        here = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
        return here if "cpu" in kinds or not kinds else here.to(torch.device(min(kinds)))


def _checked_nbytes(nbytes: int, rank: int, what: str) -> int:
    if not 0 < nbytes <= MOST_NBYTES:
        raise FormatError(f"message of rank {rank} ({what})", "length", nbytes, f"1 to {MOST_NBYTES} bytes")
    return nbytes


@contextmanager
def together(what: str, group: dist.ProcessGroup | None, hang_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Say what is done inside, should a rank be gone.

    `hang_up` ends what other ranks may wait for in another group: they fail now too, and are not taken for dead.
    """
    try:
        yield
    except Exception as error:
        found = who_is_gone(error, what, group, hang_up)
        if found is error:
            raise
        raise found from error
    raise_device_failure(what, group, hang_up)


def raise_device_failure(
    what: str, group: dist.ProcessGroup | None, hang_up: Callable[[], None] = lambda: None
) -> None:
    """Raise `TransportError` where NCCL has given up messages between the ranks of a group: data are none's then."""
    if (lost := device_failure(group)) is not None:
        raise who_is_gone(ConnectionError(lost), what, group, hang_up)


def who_is_gone(
    error: Exception, what: str, group: dist.ProcessGroup | None, hang_up: Callable[[], None] = lambda: None
) -> Exception:
    """Return a lost connection of gloo's, of NCCL's or of the store's as a `TransportError` that names who is gone.

    Once NCCL has given up, any error may follow from it, as from a size that no rank has sent.
    """
    if isinstance(error, TransportError):
        return error
    if isinstance(error, RuntimeError) and (isinstance(error, _LOST) or _SIGNS.search(str(error))):
        error = named(error)
    if (failure := device_failure(group)) is not None:
        error = error if failure in str(error) else ConnectionError(f"{failure}: {one_line(error)}")
    if not isinstance(error, ConnectionError | TimeoutError):
        return error
    hang_up()
    lost = TransportError("torch.distributed", dist.get_rank(group), what, None, str(error))
    lost.__cause__ = error
    where = Note(0, "a collective of torch's own", group=C10dTransport(group).group_name, doing=what)
    return explained(lost, notes_of(group), where, TIMEOUT_SECONDS)
