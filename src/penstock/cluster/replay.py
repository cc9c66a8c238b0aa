"""Replays a training iteration: real communication, computation replaced by waiting as long as the trace says.

Waiting costs no processor time, so 8 or 16 ranks fit on two cores, and a GPU's step can be studied on machines without
one. Deadlines are absolute, counted from the start of the iteration: lateness of one tensor does not delay the next.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from penstock.plan import Bucket, Plan
from penstock.runtime.communicator import Communicator
from penstock.timeline import COMPUTE, Span, Timeline
from penstock.trace import Trace

Clock = Callable[[], float]
_DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.float16,
}  # 2 bytes are 2 bytes


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replayed iteration as this rank saw it."""

    timeline: Timeline
    lateness_seconds: float  # how much later than the trace says the backward pass ended

    @property
    def iteration_seconds(self) -> float:
        """From the start of the forward pass to the end of the last bucket."""
        return self.timeline.iteration_seconds


class Replay:
    """Replays iterations of one plan; buffers and the communication thread are made once."""

    def __init__(self, trace: Trace, plan: Plan, communicator: Communicator) -> None:
        plan.check_against(trace)
        self._trace, self._plan, self._communicator = trace, plan, communicator
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-replay")
        dtype = np.dtype(_DTYPES[trace.dtype])
        self._buffers = [np.zeros(bucket.nbytes // dtype.itemsize, dtype) for bucket in plan.buckets]
        index_of = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
        self._bucket_after = {index_of[bucket.tensors[-1]]: number for number, bucket in enumerate(plan.buckets)}

    def run(self) -> Replayed:
        """Replay one iteration; every rank must start it at about the same time."""
        spans: list[Span] = []
        sent: list[Future[Span]] = []
        start = time.perf_counter()
        _wait_until(start + self._trace.forward_seconds)
        spans.append(Span("forward", COMPUTE, 0.0, time.perf_counter() - start, self._communicator.transport.rank))
        for index, (tensor, ready) in enumerate(zip(self._trace.tensors, self._trace.ready_seconds, strict=True)):
            _wait_until(start + ready)
            spans.append(Span(tensor.name, COMPUTE, spans[-1].end_seconds, time.perf_counter() - start, spans[0].rank))
            if self._plan.overlap and index in self._bucket_after:
                sent.append(self._send(self._bucket_after[index], start))
        lateness = spans[-1].end_seconds - self._trace.compute_seconds
        if not self._plan.overlap:
            sent = [self._send(number, start) for number in range(len(self._plan.buckets))]
        spans.extend(future.result() for future in sent)
        return Replayed(Timeline(tuple(spans)), lateness)

    def close(self) -> None:
        """End the communication thread."""
        self._thread.shutdown()

    def _send(self, number: int, start: float) -> "Future[Span]":
        return self._thread.submit(self._reduce, self._plan.buckets[number], self._buffers[number], start)

    def _reduce(self, bucket: Bucket, values: "np.ndarray[tuple[int], np.dtype[np.floating]]", start: float) -> Span:
        begin = time.perf_counter() - start
        self._communicator.all_reduce(values, strategy=bucket.strategy)
        return Span(bucket.name, "network", begin, time.perf_counter() - start, self._communicator.transport.rank)


def _wait_until(deadline: float) -> None:
    """Sleep until `deadline` of `perf_counter`; the kernel wakes us within about 0.1 ms."""
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)


def slowest(timelines: Sequence[Replayed]) -> Replayed:
    """Return the iteration that ended last."""
    return max(timelines, key=lambda replayed: replayed.iteration_seconds)
