"""Independent pieces of a step, each on a stream of its own: small kernels of one run beside another's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sides:
    """Streams beside the one that a step is taken on; none on a CPU, where pieces run one after the other."""

    streams: tuple[torch.cuda.Stream, ...]

    @classmethod
    def of(cls, pieces: int, device: str) -> "Sides":
        """Return a stream for each piece."""
        return cls(tuple(torch.cuda.Stream() for _ in range(pieces)) if device == "cuda" else ())

    def run(self, pieces: Sequence[Callable[[], None]]) -> None:
        """Run the pieces after what was launched so far; what is launched next waits for all of them.

        Pieces must not write what another reads. A graph that is being captured takes the fork and the join in.
        """
        if not self.streams:
            for piece in pieces:
                piece()
            return
        here = torch.cuda.current_stream()
        for stream, piece in zip(self.streams, pieces, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                piece()
        for stream in self.streams:
            here.wait_stream(stream)
