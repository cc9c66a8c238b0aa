"""What a user's editor sees: type checkers take this file as it is, and refuse each line of `refused.py`."""

from pathlib import Path

import torch

from penstock.torch import BulkSynchronous, Compression, DistributedDataParallel, Planning, comm_hook

compression = Compression(codec="blocks(bits=4)", dense_below=1024)
planning = Planning(planner="exact", measure_seconds=5.0, plan=Path("plan.json"))
model = DistributedDataParallel(torch.nn.Linear(4, 2), compression=compression, planning=planning, bucket_cap_mb=25)
other = DistributedDataParallel(
    torch.nn.Linear(4, 2),
    codec="gtopk",
    density=0.01,
    warmup="paper",
    planner="single",
    strategy="ring",
    device_ids=None,
    find_unused_parameters=True,
    on_nonfinite="skip",
)
seconds: float = model.held_seconds
text: str = model.explain(picture=True)
sent: int = model.bytes_sent().sent_nbytes
sender, hook = comm_hook("ring", "onebit", dense_below=64)
bsp = BulkSynchronous(torch.nn.Linear(4, 2), torch.optim.SGD, algorithm="split", codec="onebit", measure_seconds=2.0)
