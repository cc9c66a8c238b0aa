"""What the interpreter costs training: how many calls a second, and what of a rank's processor time is not a kernel's.

Ranks train for real on emulated hosts, gloo between them, with our wrapper: while the backward pass runs, lanes walk
their programs in Python. The operating system counts what each lane's thread takes, in user and in system mode. In user
mode it is either in a computation (encode, decode, merge), which runs without the interpreter's lock, or on the walk:
Python, and what engine calls do before they enter the system. So the walk is the most that lanes have held the lock
for. What handing a bucket over takes of the thread of the backward pass is added to it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from resource import RUSAGE_THREAD, getrusage
from time import perf_counter, thread_time
from typing import Annotated, Any

import typer

from penstock.bench.jobs import Done, Place, run_job, serve
from penstock.bench.record import make_record, save_record
from penstock.cli.options import JsonOption, RecordOption, split_list
from penstock.cli.output import format_seconds, print_json, print_table, progress
from penstock.exchange.exchange import Exchange
from penstock.program import Instruction
from penstock.runtime.hosts import processors
from penstock.runtime.recorder import Recorder
from penstock.runtime.schedule import Action, Do
from penstock.runtime.transport import Transport
from study import RANK, Claim, claim_documents, print_claims, start

WORKER = (__file__, RANK)
_TIMEOUT_SECONDS = 600.0
MOST_SHARE = 0.03  # of the machine's cores, that walking planned iterations may take


@dataclass(frozen=True, slots=True)
class ShareJob:
    """What the ranks are asked to train."""

    model: str
    batch: int
    codec: str
    planner: str  # wfbp: a message for each tensor; others: planned ones
    iterations: int  # that are timed


class KernelClock(Recorder):
    """Adds up what each thread's processor time of computations is, and counts actions."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.calls, self._adding = 0.0, Counter[str](), threading.Lock()

    def watch(self, rank: int, instructions: Sequence[Instruction], actions: Iterable[Action]) -> Iterator[Action]:
        """Yield the actions of one call; a computation's own time is between handing it out and being asked again."""
        computed, calls = 0.0, Counter[str]()
        for action in actions:
            calls[action.do.name] += 1
            if action.do is Do.COMPUTE:
                before = thread_time()
                yield action
                computed += thread_time() - before
            else:
                yield action
        with self._adding:
            self.seconds += computed
            self.calls += calls


@dataclass(slots=True)
class Walk:
    """What an exchange's threads took in some iterations."""

    user_seconds: float = 0.0  # of lanes' threads
    system_seconds: float = 0.0  # of the same: sending and receiving
    kernel_seconds: float = 0.0  # of computations
    handing_seconds: float = 0.0  # of buckets to lanes, on the thread of the backward pass
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def walk_seconds(self) -> float:
        """What is neither a kernel's nor the operating system's."""
        return max(0.0, self.user_seconds - self.kernel_seconds) + self.handing_seconds


def watched(exchange: Exchange, iterate: Callable[[], None], iterations: int) -> Walk:
    """Return what the threads of an exchange took of some iterations that use it."""
    handed, handing = exchange.start, [0.0]

    def timed_start(*arguments: Any, **options: Any) -> Any:
        before = thread_time()
        try:
            return handed(*arguments, **options)
        finally:
            handing[0] += thread_time() - before

    clock = exchange.communicator.recorder = KernelClock()
    exchange.start = timed_start  # type: ignore[method-assign]
    try:
        before = _lane_seconds(exchange)
        for _ in range(iterations):
            iterate()
        user, system = (now - then for now, then in zip(_lane_seconds(exchange), before, strict=True))
    finally:
        exchange.communicator.recorder = None
        exchange.start = handed  # type: ignore[method-assign]
    return Walk(user, system, clock.seconds, handing[0], clock.calls)


def _lane_seconds(exchange: Exchange) -> tuple[float, float]:
    """Return the processor seconds of all lanes' threads so far, in user and in system mode."""
    asked = [lane.submit(getrusage, RUSAGE_THREAD) for lane in exchange._threads]
    found = [each.result() for each in asked]
    return sum(each.ru_utime for each in found), sum(each.ru_stime for each in found)


def measure_job(transport: Transport, job: ShareJob, done: Done) -> Iterator[dict[str, Any]]:
    """Yield the one row of a job; every rank must call this with the same job."""
    import torch

    from penstock.torch import DistributedDataParallel
    from penstock.zoo import Shard, find_task

    torch.set_num_threads(1)
    torch.manual_seed(1)
    task = find_task(job.model)
    planning: dict[str, Any] = {"planner": job.planner, "measurements": False, "bulk": job.planner != "wfbp"}
    model = DistributedDataParallel(task.model(), codec=job.codec, **planning)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = next(task.batches(Shard(transport.rank, transport.world_size, job.batch or task.batch, seed=1), 0))

    def iterate() -> None:
        task.loss(model, data).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    while model.plan is None or model._planning.is_racing:
        iterate()
    for _ in range(3):
        iterate()
    done(f"{job.model} by {job.planner}")
    sender = model._planning.buckets.sender
    assert sender is not None
    begun = perf_counter()
    walk = watched(sender.exchange, iterate, job.iterations)
    seconds = (perf_counter() - begun) / job.iterations
    calls = sum(walk.calls.values()) / job.iterations
    share = walk.walk_seconds / job.iterations * transport.world_size / processors() / seconds
    yield {
        "model": job.model,
        "planner": job.planner,
        "messages": len(model.plan.messages),
        "iteration_seconds": seconds,
        "calls": calls,
        "calls_per_second": calls / seconds,
        "kernel_seconds": walk.kernel_seconds / job.iterations,
        "walk_seconds": walk.walk_seconds / job.iterations,
        "system_seconds": walk.system_seconds / job.iterations,
        "share": share,
    }


def interpreter_share(
    models: Annotated[
        str, typer.Option(help="each with its batch and planner; wfbp: a message for each tensor")
    ] = "vgg16_cifar:8:exact,vgg16_cifar:8:joint,vgg16_cifar:8:wfbp,resnet50:1:exact,resnet50:1:wfbp",
    codec: Annotated[str, typer.Option(help="of all buckets")] = "onebit",
    hosts: Annotated[int, typer.Option(help="emulated hosts")] = 4,
    rate: Annotated[str, typer.Option(help="of each NIC")] = "1gbit",
    iterations: Annotated[int, typer.Option(help="that are timed", min=1)] = 10,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Measure what walking programs in Python takes of training. Needs root."""
    place, jobs = Place(hosts, rate), [_job(text, codec, iterations) for text in split_list(models)]
    with progress("interpreter share", len(jobs)) as done:
        rows = [
            {"hosts": hosts, "rate": rate, "codec": codec, **row}
            for job in jobs
            for row in run_job(place, WORKER, asdict(job), partial(_tell, done), _TIMEOUT_SECONDS)
        ]
    answers = claim_documents(claims(rows))
    if out:
        save_record(make_record("interpreter_share", rows, claims=answers), out)
    if json:
        print_json({"rows": rows, "claims": answers})
        return
    print_table(
        f"the walk in Python, {hosts} ranks on {processors()} cores, {codec}",
        ("model", "planner", "messages", "iteration", "calls/s", "kernels", "system", "walk", "of all cores"),
        [
            (
                *(row[name] for name in ("model", "planner", "messages")),
                format_seconds(row["iteration_seconds"]),
                f"{row['calls_per_second']:.0f}",
                *(format_seconds(row[name]) for name in ("kernel_seconds", "system_seconds", "walk_seconds")),
                f"{100 * row['share']:.1f}%",
            )
            for row in rows
        ],
    )
    print_claims(answers)


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """Return what is asked: walking planned iterations takes next to nothing."""
    text = "{model} by {planner}: the walk, of all cores"
    return [
        Claim(text.format(**row), row["share"], MOST_SHARE, at_most=True) for row in rows if row["planner"] != "wfbp"
    ]


def _tell(done: Done, what: str) -> None:
    done(what)


def _job(text: str, codec: str, iterations: int) -> ShareJob:
    model, batch, planner = (*text.split(":"), "", "")[:3]
    return ShareJob(model, int(batch or 0), codec, planner or "exact", iterations)


if __name__ == "__main__":
    start(interpreter_share, partial(serve, lambda document: ShareJob(**document), measure_job))
