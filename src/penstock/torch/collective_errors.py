"""Turns a failed torch collective into a `TransportError` that names the rank which is gone.

gloo's own error has an address and no rank. A rank that gets one leaves a note and reads the others', as after a
message of ours (`runtime/failure_diagnosis.py`).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from penstock.errors import TransportError, one_line
from penstock.runtime.executor import TIMEOUT_SECONDS
from penstock.runtime.failure_diagnosis import Note, explained
from penstock.runtime.transport.c10d import C10dTransport, device_failure, named

# In what gloo says of connections, mostly with the name of its file, and a FileStore.
_SIGNS = re.compile("gloo/transport|pair closure|^wait timeout", re.IGNORECASE)
# Of the store, in which ranks meet before they are connected, and of NCCL.
_LOST = (dist.DistStoreError, dist.DistNetworkError, dist.DistBackendError)
_WHERE = Note(0, "a collective of torch's own")  # the same for all: ranks may be a step apart


class GroupRanks:
    """The ranks of a process group, as planning talks to them (`planning/agree.py`)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return every rank's value, by rank."""
        held: list[Any] = [None] * self.world_size
        with together(what, self._group):
            dist.all_gather_object(held, value, group=self._group)
        return held

    def from_first(self, value: Any, what: str) -> Any:
        """Return rank 0's value."""
        box = [value]
        with together(what, self._group):
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]


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
    return explained(lost, C10dTransport(group), _WHERE, TIMEOUT_SECONDS)
