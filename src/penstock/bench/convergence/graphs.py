"""Many small training runs at once on one GPU: work that repeats is a CUDA graph, and each run has a stream.

A step of ResNet-20 on a few images occupies a small part of a large GPU, and its launches cost more than its work.
Replaying a graph costs one launch; a dozen streams fill the device. Everything else (the first steps, capturing,
judging) holds a lock, as it allocates.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

_EAGER_CALLS = 2  # before capturing: libraries choose their kernels in them


@dataclass(slots=True)
class Graphed:
    """Does the same work at every call; from the third on by replaying a graph."""

    work: Callable[[], None]
    generator: torch.Generator  # of random numbers the work draws
    lock: threading.RLock
    calls: int = 0
    graph: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)

    def __call__(self) -> None:
        """Do the work once."""
        if self.calls < _EAGER_CALLS:
            with self.lock:
                self.work()
                torch.cuda.current_stream().synchronize()
        else:
            if self.calls == _EAGER_CALLS:
                with self.lock:
                    self._capture()
            self.graph.replay()
        self.calls += 1

    def _capture(self) -> None:
        self.graph.register_generator_state(self.generator)
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.work()
