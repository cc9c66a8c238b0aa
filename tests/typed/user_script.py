"""What a user's editor sees: type checkers take this file as it is, and refuse each line of `refused` below."""

from pathlib import Path

import torch

from penstock.torch import Compression, DistributedDataParallel, Planning, comm_hook

compression = Compression(codec="blocks(bits=4)", dense_below=1024)
planning = Planning(planner="exact", measure_seconds=5.0, plan=Path("plan.json"))
model = DistributedDataParallel(torch.nn.Linear(4, 2), compression=compression, planning=planning, bucket_cap_mb=25)
seconds: float = model.held_seconds
text: str = model.explain(picture=True)
sent: int = model.bytes_sent().sent_nbytes
sender, hook = comm_hook("ring", "onebit")
