"""What torch does with all ranks at our request: where a rank is gone, raise what our own collectives raise.

gloo's own error has an address and no rank. Whoever gets one leaves a note and reads the others', as after a message
of ours (`runtime/whereabouts.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from penstock.errors import TransportError
from penstock.runtime.executor import TIMEOUT_SECONDS
from penstock.runtime.transport.c10d import C10dTransport, named
from penstock.runtime.whereabouts import Note, explained

_GLOO = "gloo/transport"  # in what gloo says of connections
_WHERE = Note(0, "a collective of torch's own")  # the same for all: ranks may be a step apart


@contextmanager
def together(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Say what is done inside, should a rank be gone."""
    try:
        yield
    except RuntimeError as error:
        raise who_is_gone(error, what, group) from error


def who_is_gone(error: Exception, what: str, group: dist.ProcessGroup | None) -> Exception:
    """Return a lost connection of gloo's as a `TransportError` that names the ranks which left no note."""
    if _GLOO not in str(error) or not isinstance(error, RuntimeError):
        return error
    lost = TransportError("torch.distributed", dist.get_rank(group), what, None, str(named(error)))
    return explained(lost, C10dTransport(group), _WHERE, TIMEOUT_SECONDS)
