"""Longer wires: any engine, with a constant delay added to every message.

For kernels without `netem`. The delay is added in user space, where messages start: each send is held back and handed
to the engine by a thread of its own, in order, so that messages in flight overlap as they would on a long cable and
the rate is not touched. Only messages of this transport are delayed, not other traffic of the program.
"""

import math
import queue
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from penstock.program import Collective
from penstock.runtime.transport import Array, Bytes, Notes, Transport, Work


@contextmanager
def delayed(inner: Transport, delay_seconds: float) -> "Iterator[DelayedTransport]":
    """Yield `inner` with `delay_seconds` added to every message; messages not yet sent are sent before it ends."""
    transport = DelayedTransport(inner, delay_seconds)
    try:
        yield transport
    finally:
        transport.close()


class DelayedTransport:
    """A transport that hands each message to another one `delay_seconds` later."""

    def __init__(self, inner: Transport, delay_seconds: float) -> None:
        self._inner, self._delay_seconds = inner, delay_seconds
        self.takes_shorter = getattr(inner, "takes_shorter", False)
        self._held: queue.SimpleQueue[_Held | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_held, name="penstock-delay", daemon=True)
        self._sender.start()

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._inner.world_size

    @property
    def sent_nbytes(self) -> int:
        """The bytes that this rank has sent so far."""
        return self._inner.sent_nbytes

    def isend(self, view: Bytes, peer: int, tag: int) -> "_Held":
        """Start sending once the delay is over; `view` is in use until then, and until it is sent."""
        held = _Held(time.monotonic() + self._delay_seconds, view, peer, tag)
        self._held.put(held)
        return held

    def irecv(self, view: Bytes, peer: int, tag: int) -> Work:
        """Start receiving; the delay is the sender's business."""
        return self._inner.irecv(view, peer, tag)

    def native(self, collective: Collective, values: Array, dtype: str, root: int, seconds: float) -> None:
        """Run the engine's own collective, later by as many delays as messages must follow one another at least.

        Its messages cannot be reached from here. No algorithm brings a contribution to everyone in fewer than
        log2(world_size) steps, so the engine is shown as good as it could possibly be, never worse.
        """
        time.sleep(self._delay_seconds * math.ceil(math.log2(self.world_size)))
        self._inner.native(collective, values, dtype, root, seconds)

    def leave_note(self, text: str) -> None:
        """Leave a line for the other ranks, where the engine can."""
        if isinstance(self._inner, Notes):
            self._inner.leave_note(text)

    def read_note(self, peer: int, seconds: float) -> str | None:
        """Return the line that `peer` left."""
        return self._inner.read_note(peer, seconds) if isinstance(self._inner, Notes) else None

    def finish_reading(self, peers: Collection[int], seconds: float) -> None:
        """Say that no more notes are read."""
        if isinstance(self._inner, Notes):
            self._inner.finish_reading(peers, seconds)

    def hang_up(self) -> None:
        """Let the other ranks fail now, where the engine can."""
        if isinstance(self._inner, Notes):
            self._inner.hang_up()

    def close(self) -> None:
        """Send what is still held back and end the thread."""
        self._held.put(None)
        self._sender.join()

    def _send_held(self) -> None:
        while (held := self._held.get()) is not None:
            time.sleep(max(0.0, held.due - time.monotonic()))
            held.start(self._inner)


class _Held:
    """A message that waits for its time, then for the engine."""

    def __init__(self, due: float, view: Bytes, peer: int, tag: int) -> None:
        self.due = due  # on the monotonic clock
        self._view, self._peer, self._tag = view, peer, tag
        self._started = threading.Event()
        self._work: Work | None = None
        self._failure: Exception | None = None

    def start(self, transport: Transport) -> None:
        """Hand the message to the engine; what goes wrong is raised by `wait`."""
        try:
            self._work = transport.isend(self._view, self._peer, self._tag)
        except Exception as failure:
            self._failure = failure
        self._started.set()

    def wait(self, seconds: float) -> None:
        """Wait for the delay and then as the engine does."""
        deadline = time.monotonic() + seconds
        if not self._started.wait(seconds):
            raise TimeoutError(f"nothing for {seconds:g} s")
        if self._failure is not None:
            raise self._failure
        assert self._work is not None
        self._work.wait(max(0.0, deadline - time.monotonic()))
