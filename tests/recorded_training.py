"""What each process of the tests of recorded timelines does."""

import torch

import torch_training as training
from penstock.torch import DistributedDataParallel as OurDDP


def recorded(rank, codec):
    """Train with a codec; return the timelines before recording, while recording and after it."""
    torch.manual_seed(0)
    wrapper = OurDDP(training.plain(), codec=codec, strategy="ring", **training.quick())
    found = []
    for step in range(8):
        if step in (5, 7):
            wrapper.record_instructions(step == 5)
        wrapper(torch.ones(4, 8) * (rank + step)).sum().backward()
        found.append(wrapper.measured_timeline())
    return found[4], found[6], found[7]
