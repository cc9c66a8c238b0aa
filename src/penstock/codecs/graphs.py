"""The same kernels again and again, launched as one: a CUDA graph for each task of a bucket.

Launching a kernel takes the interpreter longer than most kernels run, and a bucket has three or more for each of its
tensors. So what a task queues is launched one by one the first time, when kernels are compiled, captured the second
time, and from then on replayed: one launch, whatever the number of tensors. Addresses and sizes never change, since a
task belongs to one bucket. Outside a stream of our own (the default stream cannot be captured) it stays one by one.

Tensors have nothing to do with one another: their kernels are queued `side_by_side` on a few streams, and are branches
of the graph. Most are too small to fill a GPU by themselves.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

LANES = 16  # each kernel of a chain waits for room among the model's; chains beside one another wait together
URGENT = -1  # priority of streams whose kernels are small and waited for; the model's have 0

Work = Callable[[], None]


class Replays:
    """Makes replays on one device; they share memory to work in, as they run one after another on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.index = device, device.index
        if device.type == "cuda" and self.index is None:
            self.index = torch.cuda.current_device()
        self.pool: Any = None
        self.newest: torch.cuda.CUDAGraph | None = None  # torch gives the pool up with the last graph that is in it
        self._lanes: list[torch.cuda.Stream] = []

    def make(self, work: Work) -> Work:
        """Return what does `work` again and again."""
        return _Replay(self, work).run if self.device.type == "cuda" else work

    def side_by_side(self, jobs: Sequence[Work]) -> None:
        """Queue jobs that do not hang on one another; what the current stream is given next finds all of them done."""
        lanes = self._lanes_for(len(jobs))
        if not lanes:
            for job in jobs:
                job()
            return
        here = torch.cuda.current_stream(self.device)
        for lane in lanes:
            lane.wait_stream(here)
        for number, lane in enumerate(lanes):
            with torch.cuda.stream(lane):
                for job in jobs[number :: len(lanes)]:
                    job()
        for lane in lanes:
            here.wait_stream(lane)

    def _lanes_for(self, count: int) -> list[torch.cuda.Stream]:
        if self.device.type != "cuda" or count < 2:
            return []
        if not self._lanes:
            self._lanes = [urgent_stream(self.device) for _ in range(LANES)]
        return self._lanes[:count]


def urgent_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream whose kernels go before those of the backward pass that wait with them."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=URGENT)  # type: ignore[no-untyped-call]
    return stream


class _Replay:
    def __init__(self, owner: Replays, work: Work) -> None:
        self._owner, self._work = owner, work
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = 0  # where it was done before; 0, the default stream, cannot be captured

    def run(self) -> None:
        """Do the work, in whichever way is quickest by now."""
        stream = torch._C._cuda_getCurrentRawStream(self._owner.index)  # a stream object takes longer to make
        if not stream or self._stream != stream:
            self._stream, self._graph = stream, None
            self._work()
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Capture the work; other threads may use the device meanwhile, as the backward pass does."""
        owner, graph = self._owner, torch.cuda.CUDAGraph()
        if owner.pool is None:
            owner.pool = torch.cuda.graph_pool_handle()
        with _no_collection():
            graph.capture_begin(pool=owner.pool, capture_error_mode="thread_local")
            try:
                self._work()
            finally:
                graph.capture_end()
        owner.newest = graph
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the interpreter from deleting old graphs on this thread while it captures: the driver forbids that."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
