"""What the interpreter costs training: how many calls a second, and what of a rank's processor time is not a kernel's.

Ranks train for real on emulated hosts, gloo between them, with our wrapper: while the backward pass runs, lanes walk
their programs in Python. Each lane's thread has a clock of its processor time (`time.thread_time`, which the scheduler
keeps to the nanosecond; user and system time apart are sampled by ticks, and a lane wakes for less than a tick).

What is claimed is a bound. `walk` is all that lanes' threads take but kernels and what they are inside of the engine's
compiled calls (torch's `send`, `recv` and `wait`, which release the interpreter's lock), and what handing a bucket over
takes of the thread of the backward pass. That is the most that they have held the lock for; these clocks are in it. A
kernel's call is Python too: what computations take where kernels do nothing, in iterations of their own after the
others, counts as walk. Were the lock held in engine calls all the same, `engine` would have to be added.

Plans are not raced, which would take up to thirty iterations more. Three parts of so many iterations; figures are
medians of the three, rank 0's, and shares are of all ranks as if all were like it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter, thread_time
from typing import Annotated, Any

import typer
from numba import njit

from penstock.bench.jobs import Done, Place, run_job, serve
from penstock.bench.record import make_record, save_record
from penstock.cli.options import JsonOption, RecordOption, split_list
from penstock.cli.output import format_seconds, print_json, print_table, progress
from penstock.compll.backends.numba.backend import ARGUMENTS, PIECES_ARGUMENTS, NumbaKernels
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
PARTS = 3
_BEFORE_IDLE = 2  # iterations: the first calls kernels, as nothing of the residual is put off yet


@dataclass(frozen=True, slots=True)
class ShareJob:
    """What the ranks are asked to train."""

    model: str
    batch: int
    codec: str
    planner: str  # wfbp: a message for each tensor; others: planned ones
    iterations: int  # of each part


class KernelClock(Recorder):
    """Adds up the processor time of computations and of engine calls on all threads, and counts actions."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel_seconds, self.engine_seconds, self._adding = 0.0, 0.0, threading.Lock()
        self.calls = Counter[str]()
        self._here = threading.local()

    def watch(self, rank: int, instructions: Sequence[Instruction], actions: Iterable[Action]) -> Iterator[Action]:
        """Yield the actions of one call; a computation's own time is between handing it out and being asked again."""
        calls, kernel_seconds = Counter[str](), 0.0
        self._here.engine_seconds = 0.0  # from here on calls of the engine are those of a lane
        for action in actions:
            calls[action.do.name] += 1
            if action.do is Do.COMPUTE:
                before = thread_time()
                yield action
                kernel_seconds += thread_time() - before
            else:
                yield action
        with self._adding:
            self.engine_seconds += self._here.engine_seconds
            self.calls += calls
            self.kernel_seconds += kernel_seconds
        del self._here.engine_seconds

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of the engine that adds up its processor time where a lane makes it."""
        here = self._here

        def wrapped(*arguments: Any, **options: Any) -> Any:
            before = thread_time()
            try:
                return call(*arguments, **options)
            finally:
                if hasattr(here, "engine_seconds"):
                    here.engine_seconds += thread_time() - before

        return wrapped


@dataclass(frozen=True, slots=True)
class Walk:
    """What an exchange's threads took of an iteration, in seconds of a processor."""

    lane_seconds: float  # of lanes' threads, all
    kernel_seconds: float  # of computations, with their calls
    engine_seconds: float  # inside of the engine's compiled calls, which release the lock
    handing_seconds: float  # of buckets to lanes, on the thread of the backward pass
    calls: Mapping[str, float]

    @property
    def walk_seconds(self) -> float:
        """The most that the interpreter's lock was held for, but for calling kernels."""
        return max(0.0, self.lane_seconds - self.kernel_seconds - self.engine_seconds) + self.handing_seconds


def watched(
    exchange: Exchange, iterate: Callable[[], None], iterations: int, engine: Sequence[tuple[Any, str]] = ()
) -> Walk:
    """Return what the threads of an exchange took of each of some iterations that use it.

    `engine` are the compiled calls of its engine, each as a class and a method's name.
    """
    handed, handing = exchange.start, [0.0]

    def timed_start(*arguments: Any, **options: Any) -> Any:
        before = thread_time()
        try:
            return handed(*arguments, **options)
        finally:
            handing[0] += thread_time() - before

    clock = exchange.communicator.recorder = KernelClock()
    exchange.start = timed_start  # type: ignore[method-assign]
    plain = [(kind, name, vars(kind)[name]) for kind, name in engine]  # which binds `self`, as its attribute may not
    for kind, name, _ in plain:
        setattr(kind, name, clock.timed(getattr(kind, name)))
    try:
        before = _lane_seconds(exchange)
        for _ in range(iterations):
            iterate()
        taken = _lane_seconds(exchange) - before
    finally:
        for kind, name, call in plain:
            setattr(kind, name, call)
        exchange.communicator.recorder = None
        exchange.start = handed  # type: ignore[method-assign]
    return Walk(
        taken / iterations,
        clock.kernel_seconds / iterations,
        clock.engine_seconds / iterations,
        handing[0] / iterations,
        {name: count / iterations for name, count in clock.calls.items()},
    )


def dispatch_seconds(exchange: Exchange, iterate: Callable[[], None], iterations: int) -> float:
    """Return what computations take of an iteration where kernels are called as ever and do nothing.

    Gradients stay what they are on each rank, so nothing can be trained afterwards.
    """
    for prepared in exchange.communicator._prepared.values():
        prepared._bindings.clear()  # they hold kernels
    bound = NumbaKernels.bound
    NumbaKernels.bound = _idle  # type: ignore[assignment,method-assign]
    try:
        for _ in range(_BEFORE_IDLE):
            iterate()
        return watched(exchange, iterate, iterations).kernel_seconds
    finally:
        NumbaKernels.bound = bound  # type: ignore[method-assign]


def _idle(kernels: NumbaKernels, kind: str, arguments: Any) -> Callable[..., int]:
    """Return a kernel that is called as one of `kind`, says that all went well, and does nothing."""
    of_one = ARGUMENTS.get(kind)
    own_names = (f"own{number}" for number in range(len(kernels.program.arguments)))
    names = [*(of_one or PIECES_ARGUMENTS), *own_names]
    result = "table.shape[0]" if of_one is None else "out.size" if kind.startswith("encode") else "0"
    kernel, own = njit(nogil=True)(eval(f"lambda {', '.join(names)}: {result}")), kernels._own(arguments)
    return (lambda *operands: kernel(*operands, *own)) if own else kernel


def _lane_seconds(exchange: Exchange) -> float:
    """Return the processor seconds of all lanes' threads so far."""
    return sum(asked.result() for asked in [lane.submit(thread_time) for lane in exchange._threads])


def measure_job(transport: Transport, job: ShareJob, done: Done) -> Iterator[dict[str, Any]]:
    """Yield the one row of a job; every rank must call this with the same job."""
    import torch

    from penstock.torch import DistributedDataParallel
    from penstock.zoo import Shard, find_task

    torch.set_num_threads(1)
    torch.manual_seed(1)
    task = find_task(job.model)
    planning: dict[str, Any] = {
        "planner": job.planner,
        "measurements": False,
        "bulk": job.planner != "wfbp",
        "race": False,
    }
    model = DistributedDataParallel(task.model(), codec=job.codec, **planning)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = next(task.batches(Shard(transport.rank, transport.world_size, job.batch or task.batch, seed=1), 0))

    def iterate() -> None:
        task.loss(model, data).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    while model.plan is None:
        iterate()
    for _ in range(3):
        iterate()
    done(f"{job.model} by {job.planner}")
    sender = model._planning.buckets.sender
    assert sender is not None
    parts = [_part(sender.exchange, iterate, job.iterations) for _ in range(PARTS)]
    calling = dispatch_seconds(sender.exchange, iterate, max(1, job.iterations // PARTS))
    found = [_figures(each, seconds, calling, transport.world_size) for each, seconds in parts]
    yield {
        "model": job.model,
        "planner": job.planner,
        "messages": len(model.plan.messages),
        "iterations": PARTS * job.iterations,
        **{name: median(part[name] for part in found) for name in found[0]},
        "share_spread": max(part["share"] for part in found) - min(part["share"] for part in found),
    }


def _part(exchange: Exchange, iterate: Callable[[], None], iterations: int) -> tuple[Walk, float]:
    """Return what the walk takes of an iteration, and the seconds of an iteration."""
    import torch.distributed as dist

    engine = ((dist.ProcessGroup, "send"), (dist.ProcessGroup, "recv"), (dist.Work, "wait"))
    begun = perf_counter()
    walk = watched(exchange, iterate, iterations, engine)
    return walk, (perf_counter() - begun) / iterations


def _figures(walk: Walk, seconds: float, dispatch_seconds: float, world_size: int) -> dict[str, float]:
    """Return the figures of an iteration of so many seconds, the walk's share of all cores among them."""
    walk_seconds = walk.walk_seconds + dispatch_seconds
    calls = sum(walk.calls.values())
    return {
        "iteration_seconds": seconds,
        "calls": calls,
        "calls_per_second": calls / seconds,
        "kernel_seconds": walk.kernel_seconds,
        "dispatch_seconds": dispatch_seconds,
        "engine_seconds": walk.engine_seconds,
        "walk_seconds": walk_seconds,
        "share": walk_seconds * world_size / processors() / seconds,
    }


def interpreter_share(
    models: Annotated[
        str, typer.Option(help="each with its batch and planner; wfbp: a message for each tensor")
    ] = "vgg16_cifar:8:joint,vgg16_cifar:8:exact,vgg16_cifar:8:wfbp,resnet50:1:exact,resnet50:1:wfbp",
    codec: Annotated[str, typer.Option(help="of all buckets")] = "onebit",
    hosts: Annotated[int, typer.Option(help="emulated hosts")] = 4,
    rate: Annotated[str, typer.Option(help="of each NIC")] = "1gbit",
    iterations: Annotated[int, typer.Option(help="of each of three parts", min=1)] = 34,
    few: Annotated[int, typer.Option(help="the same with wfbp, of which nothing is claimed", min=1)] = 3,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Measure what walking programs in Python takes of training. Needs root."""
    place, jobs = Place(hosts, rate), [_job(text, codec, iterations, few) for text in split_list(models)]
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
        (
            "model",
            "planner",
            "messages",
            "iteration",
            "calls/s",
            "kernels",
            "engine",
            "walk",
            "of all cores",
            "spread",
        ),
        [
            (
                *(row[name] for name in ("model", "planner", "messages")),
                format_seconds(row["iteration_seconds"]),
                f"{row['calls_per_second']:.0f}",
                *(format_seconds(row[name]) for name in ("kernel_seconds", "engine_seconds", "walk_seconds")),
                *(f"{100 * row[name]:.1f}%" for name in ("share", "share_spread")),
            )
            for row in rows
        ],
    )
    print_claims(answers)


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """Return what is asked: walking planned iterations takes next to nothing.

    Nothing is asked with a message for each tensor: what mends that is fewer messages, which plans and bulks make.
    """
    text = "{model} by {planner}: the walk, of all cores"
    return [
        Claim(text.format(**row), row["share"], MOST_SHARE, at_most=True) for row in rows if row["planner"] != "wfbp"
    ]


def _tell(done: Done, what: str) -> None:
    done(what)


def _job(text: str, codec: str, iterations: int, few: int) -> ShareJob:
    model, batch, planner = (*text.split(":"), "", "")[:3]
    return ShareJob(model, int(batch or 0), codec, planner or "exact", few if planner == "wfbp" else iterations)


if __name__ == "__main__":
    start(interpreter_share, partial(serve, lambda document: ShareJob(**document), measure_job))
