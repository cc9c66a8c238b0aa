"""What a benchmark's worker does around its job: join the others, report each row, leave together."""

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from penstock.bench.jobs import report
from penstock.runtime.transport import Transport
from penstock.runtime.transport.c10d import C10dTransport

Job = TypeVar("Job")
Measure = Callable[[Transport, Job, Callable[[str], None]], Iterable[dict[str, Any]]]


def serve(read_job: Callable[[dict[str, Any]], Job], measure: Measure[Job]) -> None:
    """Measure the job given as JSON on the command line; rank 0 reports rows, and what was just done, for progress."""
    job = read_job(json.loads(sys.argv[1]))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for row in measure(C10dTransport(), job, lambda name: report(rank, {"done": name})):
        report(rank, row)
    dist.barrier()
    dist.destroy_process_group()
