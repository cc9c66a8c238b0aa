"""A rank that dies at a chosen message, as `kill -9` would have it."""

import os
import signal
from typing import Any


class Suicidal:
    """A transport whose process is killed before a certain message."""

    def __init__(self, transport: Any, actions: int) -> None:
        self._transport, self._left = transport, actions
        self.rank, self.world_size = transport.rank, transport.world_size

    def isend(self, view: Any, peer: int, tag: int) -> Any:
        self._count()
        return self._transport.isend(view, peer, tag)

    def irecv(self, view: Any, peer: int, tag: int) -> Any:
        self._count()
        return self._transport.irecv(view, peer, tag)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
