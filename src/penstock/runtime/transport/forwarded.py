"""Notes of an engine behind another: what transports that wrap one have in common."""

from penstock.runtime.transport import Notes, Transport


class ForwardedNotes:
    """Passes notes on to the engine inside, where it has them."""

    _inner: Transport

    def leave_note(self, text: str) -> None:
        """Leave a line for the other ranks, where the engine can."""
        if isinstance(self._inner, Notes):
            self._inner.leave_note(text)

    def read_note(self, peer: int, seconds: float) -> str | None:
        """Return the line that `peer` left."""
        return self._inner.read_note(peer, seconds) if isinstance(self._inner, Notes) else None

    def hang_up(self) -> None:
        """Let the other ranks fail now, where the engine can."""
        if isinstance(self._inner, Notes):
            self._inner.hang_up()
