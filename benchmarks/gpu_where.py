r"""Where do the milliseconds of coded buckets go on GPU ranks: kernels, messages, waits?

    penstock cluster run --hosts 4 --rate 10gbit --gpus shared --rank0 -- \
        python benchmarks/gpu_where.py OUT.json gpt --rate 10gbit --plan PLAN.json

A plan is made and written, or read where the file exists. Rows are iterations with it, in turns:

    nothing sent        torch's wrapper, whose hook does nothing
    the plan            as it ships
    no messages         kernels alone; they decode what was there before
    no kernels          messages alone, of what was there before
    neither             what the hook itself costs

`timeline` has when each group of messages of the plan was queued and went, in ms since the iteration began on the
device: "ready" is when the bucket's last gradient was, "arrived" when the group before had arrived, "encoded" when the
kernels before this group were through. The last row of a timeline is the end of the iteration. Another --rate, or
CUDA_DEVICE_MAX_CONNECTIONS=32, is another run with the same plan.
"""

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from gpu_ranks import DEVICE, METHODS, WORKLOADS, Contestant, Method, agreed, gathered, ours
from penstock.bench.record import make_record, save_record
from penstock.plan import Plan, load_plan, save_plan
from penstock.runtime.device import queued
from penstock.runtime.device.messages import GroupedMessages

ROUNDS, TIMED = 2, 5  # turns of all rows; iterations of a timeline
LIMIT_SECONDS = 100.0  # no further turn begins after that


def event() -> torch.cuda.Event:
    """Return a moment in the current stream."""
    found = torch.cuda.Event(enable_timing=True)
    found.record()
    return found


class WatchedMessages(GroupedMessages):
    """Messages that note when they were queued, and when what they wait for was there."""

    def _advance(self) -> None:
        begun = event()
        for work in self._works:
            work.wait()
        arrived = event()
        calls = [call for flight in self._flights for call in flight.advance()]
        self._flights = [flight for flight in self._flights if flight.left]
        self.noted.append((begun, arrived, event(), sum(memory[0].nbytes for _, memory, _ in calls) / 1e6))
        self._works = self._start(calls) if calls else []


class NoMessages(GroupedMessages):
    """Messages that are not sent."""

    def _start(self, calls: Sequence[Any]) -> list[Any]:
        return []


@dataclass(frozen=True)
class Row:
    """What is timed."""

    method: Method
    kernels: bool = True
    messages: bool = True
    is_watched: bool = False


def rows(plan: Plan, codec: str) -> dict[str, Row]:
    """Return all rows, by label."""
    planned = ours(codec=codec, plan=plan)
    return {
        "none": Row(METHODS["none"]),
        "nothing sent": Row(METHODS["ddp, nothing sent"]),
        "the plan": Row(planned, is_watched=True),
        "no messages": Row(planned, messages=False),
        "no kernels": Row(planned, kernels=False),
        "neither": Row(planned, kernels=False, messages=False),
    }


@contextmanager
def without_kernels(wanted: bool) -> Iterator[None]:
    """Have programs that are bound to buckets queue no kernels, unless these are wanted."""
    if wanted:
        yield
        return
    with patch.object(queued._Bound, "_replayed", lambda self, works: []):
        yield


class Timed:
    """A row that is ready to be timed."""

    def __init__(self, model: str, row: Row) -> None:
        with without_kernels(row.kernels):
            self.contestant = Contestant(model, row.method)
        self._is_watched = row.is_watched
        if not row.messages:
            self._messages().__class__ = NoMessages

    def _sender(self) -> Any:
        return self.contestant.wrapped._planning.buckets.sender

    def _messages(self) -> GroupedMessages:
        return self._sender().exchange.communicator.messages

    def timeline(self) -> list[dict[str, float]]:
        """Return when each group of messages came to what, as the median of some iterations; [] for other rows."""
        if not self._is_watched:
            return []
        iterations = [self._watched() for _ in range(TIMED)]
        groups = zip(*iterations, strict=True)
        return [{name: round(median(one[name] for one in group), 2) for name in group[0]} for group in groups]

    def _watched(self) -> list[dict[str, float]]:
        messages, lanes, ready = self._messages(), self._sender()._lanes, []
        behind = lanes.behind
        messages.__class__, messages.noted = WatchedMessages, []

        def noted(device: torch.device) -> Callable[..., Any]:
            ready.append((event(), len(messages.noted)))  # of the bucket whose first group comes next
            return behind(device)

        with patch.object(lanes, "behind", noted):
            begun = event()
            self.contestant.steps(1)
            end = event()
        messages.__class__ = GroupedMessages
        end.synchronize()
        buckets = {group: moment for moment, group in ready}
        found = []
        for group, (queued_at, arrived, encoded, mb) in enumerate(messages.noted):
            moments = {"queued": queued_at, "arrived": arrived, "encoded": encoded}
            row = {name: begun.elapsed_time(moment) for name, moment in moments.items()} | {"mb": mb}
            found.append(({"ready": begun.elapsed_time(buckets[group])} if group in buckets else {}) | row)
        return [*found, {"end": begun.elapsed_time(end)}]


@dataclass
class Findings:
    """What was found; rank 0 writes it."""

    path: Path
    rate: str
    model: str
    started: float = field(default_factory=time.time)
    ms: dict[str, list[float]] = field(default_factory=dict)
    timeline: list[dict[str, float]] = field(default_factory=list)
    nbytes_of_buckets: list[int] = field(default_factory=list)

    def say(self, *words: Any) -> None:
        """Print a line on rank 0, after the seconds since the start."""
        if dist.get_rank() == 0:
            print(f"[{time.time() - self.started:6.1f}]", *words, flush=True)

    def save(self) -> None:
        """Write the record on rank 0."""
        if dist.get_rank() == 0:
            common = {"model": WORKLOADS[self.model].label, "rate": self.rate, "hosts": dist.get_world_size()}
            found = [{**common, "method": label, "ms_per_iteration": ms} for label, ms in self.ms.items()]
            notes = f"up to {ROUNDS} rounds, rows in turns; without messages, kernels decode what was there before"
            connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "as the driver has them")
            more = {
                "timeline": self.timeline,
                "nbytes_of_buckets": self.nbytes_of_buckets,
                "device_queues": connections,
            }
            record = make_record("gpu-where", found, notes=notes, **more)
            record["machine"]["gpus"] = f"1 x {torch.cuda.get_device_name(DEVICE)}, shared by all ranks"
            save_record(record, self.path)


def find_plan(findings: Findings, codec: str, path: Path) -> Plan:
    """Return the plan: read, or made and written."""
    if path.exists():
        return load_plan(path)
    made = Contestant(findings.model, ours(codec=codec, race=False))
    found = made.wrapped.plan
    findings.say(made.wrapped.explain())
    if dist.get_rank() == 0:
        save_plan(found, path)
    del made
    gc.collect()
    return found


def measure(findings: Findings, codec: str, path: Path) -> None:
    """Time all rows in turns, then look into the plan's."""
    plan = find_plan(findings, codec, path)
    findings.nbytes_of_buckets = [bucket.nbytes for bucket in plan.buckets]
    ready = {}
    for label, row in rows(plan, codec).items():
        ready[label] = Timed(findings.model, row)
        findings.say(label, "ready")
    findings.ms = {label: [] for label in ready}
    for _ in range(ROUNDS):
        for label, each in ready.items():
            findings.ms[label].append(each.contestant.time(WORKLOADS[findings.model].iterations)[0])
        findings.say({label: ms[-1] for label, ms in findings.ms.items()})
        findings.save()
        if agreed(time.time() - findings.started > LIMIT_SECONDS):
            break
    for label, each in ready.items():
        mine = each.timeline()
        if mine:
            findings.timeline = mine
            findings.say(label, "ends on each rank at", gathered(mine[-1]["end"]))
            for moment in mine:
                findings.say(moment)
    findings.save()
    dist.barrier()


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("model", choices=list(WORKLOADS))
    parser.add_argument("--rate", required=True, help="of the links, for the record: 10gbit")
    parser.add_argument("--codec", default="blocks(bits=4)")
    parser.add_argument("--plan", type=Path, required=True, metavar="PLAN.json", help="is made where there is none")
    options = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    try:
        with patch.object(queued._Outcome, "settle", lambda self: None):  # what is not sent cannot be decoded
            findings = Findings(options.out, options.rate, options.model)
            measure(findings, options.codec, options.plan)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: NCCL's threads would wait for the other ranks
    os._exit(0)


if __name__ == "__main__":
    main()
