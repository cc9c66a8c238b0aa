"""Many small training runs at once on one GPU: each run's step is a CUDA graph, each run has a stream.

A step of ResNet-20 on a few images occupies a small part of a large GPU, and its launches cost more than its work.
Replaying a graph costs one launch; a dozen streams fill the device. Everything else (the first steps, capturing,
judging) holds a lock, as it allocates.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from penstock.bench.convergence.training import Run

_EAGER_STEPS = 2  # real steps before capturing: libraries choose their kernels in them


@dataclass(slots=True)
class GraphedStep:
    """Does one step of a run; from the third on by replaying a graph."""

    run: Run
    lock: threading.RLock
    calls: int = 0
    graph: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)

    def __call__(self) -> None:
        """Do one step."""
        if self.calls < _EAGER_STEPS:
            with self.lock:
                self.run.step()
                torch.cuda.current_stream().synchronize()
        else:
            if self.calls == _EAGER_STEPS:
                with self.lock:
                    self._capture()
            self.graph.replay()
        self.calls += 1

    def _capture(self) -> None:
        self.graph.register_generator_state(self.run.rounding)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self.run.step()


def graphed(lock: threading.RLock) -> Callable[[Run], Callable[[], None]]:
    """Return what makes graphed steps that share a lock."""
    return lambda run: GraphedStep(run, lock)
