"""What each process of a test that traces one bucket does: which of our functions run between hook and average."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import penstock
from penstock.torch import comm_hook

ROOT = str(Path(penstock.__file__).parent)
STEADY = 6  # iteration that is traced


class Tracer:
    """Notes calls of our functions on the hook's thread and on the communication threads, bucket by bucket."""

    def __init__(self) -> None:
        self.on = False
        self.calls: dict[str, list[list[tuple[str, str]]]] = {}  # by the entry on a thread: buckets, calls in order
        self._inside = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not self.on or event not in ("call", "return") or not code.co_filename.startswith(ROOT):
            return
        entry, name = getattr(self._inside, "entry", None), code.co_qualname
        if event == "return":
            if frame is entry:
                self._inside.entry = None
            return
        if entry is None and name in ("BucketSender.hook", "Exchange._run"):
            self._inside.entry, self._inside.calls = frame, []  # other lanes go on meanwhile
            entry = frame
            self.calls.setdefault(name, []).append(self._inside.calls)
        if entry is not None and not code.co_name.startswith("<"):
            path = str(Path(code.co_filename).relative_to(ROOT))
            self._inside.calls.append((path, name))


def trace_a_bucket(rank: int, codec: str) -> dict[str, list[tuple[str, str]]]:
    """Return what runs for a steady bucket: on the hook's thread, and on the communication thread."""
    tracer = Tracer()
    threading.setprofile(tracer)  # for the communication thread, which starts with the first bucket
    module = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    wrapper = TorchDDP(module, bucket_cap_mb=0.3, gradient_as_bucket_view=True)
    sender, hook = comm_hook("ring", codec, module=module)
    wrapper.register_comm_hook(sender, hook)
    for step in range(STEADY + 1):
        wrapper.zero_grad()
        loss = wrapper(torch.randn(4, 300)).sum()
        tracer.on = step == STEADY
        sys.setprofile(tracer if tracer.on else None)
        loss.backward()
        sys.setprofile(None)
    threading.setprofile(None)
    return {entry: min(buckets, key=len) for entry, buckets in tracer.calls.items()}  # the others begin the iteration
