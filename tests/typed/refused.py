"""Mistakes in options that type checkers find: one a line, from line 7 on."""

from torch.nn import Linear

from penstock.torch import BulkSynchronous, Compression, DistributedDataParallel, Planning, comm_hook

Compression(codek="onebit")
Compression(clip_by="layer")
Compression(density="0.01")
Compression(warmup="papper")
Planning(planer="exact")
Planning(planner="exat")
Planning(measure_seconds="ten")
DistributedDataParallel(Linear(4, 2), codek="onebit")
DistributedDataParallel(Linear(4, 2), planner="exat")
DistributedDataParallel(Linear(4, 2), density="0.01")
DistributedDataParallel(Linear(4, 2), engine="mpy")
DistributedDataParallel(Linear(4, 2), on_nonfinite="ignore")
DistributedDataParallel(Linear(4, 2), find_unused_parameter=True)
comm_hook("ring", densety=0.1)
BulkSynchronous(Linear(4, 2), lambda parameters: None, algorithm="splitt")
