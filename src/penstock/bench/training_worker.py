"""One rank of `penstock bench train`: trains the same model by several methods in turn, and times each.

Every method has a module, a wrapper and an optimizer of its own; the modules share their weights' memory, so that
many fit. Methods take turns, a few iterations each, round after round: a slow moment of the machine falls on all.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from penstock.bench.jobs import report
from penstock.cluster.processes import sent_nbytes
from penstock.errors import PenstockError, did_you_mean
from penstock.planners import PLANNERS
from penstock.runtime.transport.meeting import join_group
from penstock.torch import DistributedDataParallel as PlannedDataParallel
from penstock.torch.clocks import synchronise
from penstock.torch.optim import CompressedAdamW
from penstock.torch.overlap import ALGORITHMS, BulkSynchronous
from penstock.zoo import Shard, Task, find_task
from penstock.zoo.task import to_device

ALONE = "no-communication"
DEFAULT = "ddp"
STOCK = "ddp with other buckets"  # kinds of method, by what they may be compared with
PLANNED = "planned"
OTHER = "other"
NIC = "eth0"  # of an emulated host, inside
LEARNING_RATE = 1e-3  # small: weights must stay finite, since denormal or infinite ones change the speed
ADAMW_LEARNING_RATE = 1e-5  # a weight's change in a step, whatever its gradient


@dataclass(frozen=True, slots=True)
class Trained:
    """A model that is being trained."""

    model: nn.Module
    update: Callable[[], None]  # after each backward pass: changes the weights and forgets the gradients
    finish: Callable[[], None] | None = None  # waits for what is still under way after an update, where anything is


@dataclass(frozen=True, slots=True)
class Method:
    """A way of training."""

    begin: Callable[[nn.Module, int], Trained]  # from a module, and the iterations to profile
    kind: str
    plans: bool = False  # its first iterations profile
    risky: bool = False  # may crash its process, so it runs in one of its own


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return what every method updates its weights with."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def _updated_at_once(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Trained:
    optimizer = optimizer or make_optimizer(model.parameters())

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, update)


def _bare(module: nn.Module, _: int) -> Trained:
    return _updated_at_once(module)


def _stock(module: nn.Module, _: int, **options: Any) -> Trained:
    return _updated_at_once(DistributedDataParallel(module, **options))


def _hooked(module: nn.Module, _: int, hook: Callable[..., Any], state: Callable[[], Any] = lambda: None) -> Trained:
    model = DistributedDataParallel(module)
    model.register_comm_hook(state(), hook)
    return _updated_at_once(model)


def _send_nothing(_: None, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
    """Be a hook that leaves each rank its own gradients."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _powersgd_state() -> PowerSGDState:
    """Return torch's defaults, except that it compresses from the third iteration on and not from the thousandth."""
    return PowerSGDState(process_group=None, start_powerSGD_iter=2)


def _planned(module: nn.Module, profile_iterations: int, **options: Any) -> Trained:
    return _updated_at_once(PlannedDataParallel(module, profile_iterations=profile_iterations, **options))


def _by_adamw(model: nn.Module) -> Trained:
    return _updated_at_once(model, torch.optim.AdamW(model.parameters(), lr=ADAMW_LEARNING_RATE))


def _by_compressed_adamw(module: nn.Module, profile_iterations: int, codec: str) -> Trained:
    """Return what exchanges momentum from the first iteration with a plan on: it warms up as long as is profiled."""
    model = PlannedDataParallel(module, profile_iterations=profile_iterations, codec=codec)
    optimizer = CompressedAdamW(
        model.parameters(), lr=ADAMW_LEARNING_RATE, ddp=model, warmup_steps=max(2, profile_iterations)
    )
    return _updated_at_once(model, optimizer)


def _bulk_synchronous(module: nn.Module, _: int, **options: Any) -> Trained:
    model = BulkSynchronous(module, make_optimizer, **options)
    return Trained(model, model.step, model.finish)


METHODS: dict[str, Method] = {
    ALONE: Method(_bare, OTHER),  # the bare module on every rank: no wrapper, so nothing is sent
    DEFAULT: Method(_stock, STOCK),
    **{f"ddp-{mib}": Method(partial(_stock, bucket_cap_mb=mib), STOCK) for mib in (1, 5, 25, 100)},
    "ddp-views": Method(partial(_stock, gradient_as_bucket_view=True), STOCK),
    "ddp-fp16": Method(partial(_hooked, hook=default_hooks.fp16_compress_hook), OTHER),
    "ddp-bf16": Method(partial(_hooked, hook=default_hooks.bf16_compress_hook), OTHER),
    "ddp-silent": Method(partial(_hooked, hook=_send_nothing), OTHER),  # what torch's wrapper costs by itself
    "ddp-powersgd": Method(partial(_hooked, hook=powerSGD_hook, state=_powersgd_state), OTHER, risky=True),
    **{  # as their papers have them: a message for each bucket
        f"penstock-{name}": Method(partial(_planned, planner=name, bulk=False), PLANNED, plans=True)
        for name in PLANNERS
    },
    "penstock-wfbp-bulk": Method(partial(_planned, planner="wfbp"), PLANNED, plans=True),
    "penstock-exact-native": Method(partial(_planned, planner="exact", strategy="native"), PLANNED, plans=True),
    **{f"penstock-bsp-{name}": Method(partial(_bulk_synchronous, algorithm=name), PLANNED) for name in ALGORITHMS},
    **{
        f"penstock-{name}": Method(partial(_planned, codec=codec), OTHER, plans=True)
        for name, codec in (
            ("onebit", "onebit"),
            ("terngrad", "terngrad(bitwidth=2)"),
            ("gtopk", "gtopk(density=0.001)"),
            ("blocks", "blocks(bits=4)"),
            ("auto", "auto"),
        )
    },
    # Another optimizer: to be compared with one another, since AdamW's step takes longer than SGD's.
    f"{ALONE}-adamw": Method(lambda module, _: _by_adamw(module), OTHER),
    f"{DEFAULT}-adamw": Method(lambda module, _: _by_adamw(DistributedDataParallel(module)), OTHER),
    "penstock-compressed-adamw": Method(partial(_by_compressed_adamw, codec="onebit(block=256)"), OTHER, plans=True),
    **{
        f"penstock-onebit-{name}": Method(partial(_planned, codec="onebit", planner=name), OTHER, plans=True)
        for name in ("selective", "joint")
    },
    **{
        f"penstock-onebit-by-{name}": Method(partial(_planned, codec="onebit", strategy=name), OTHER, plans=True)
        for name in ("ring", "parameter_server", "all_gather")
    },
    **{
        f"penstock-onebit-wfbp{name}": Method(
            partial(_planned, codec="onebit", planner="wfbp", bulk=bulk), OTHER, plans=True
        )
        for name, bulk in (("", False), ("-bulk", True))
    },
}


def find_method(name: str) -> Method:
    """Return the method called `name`."""
    if name not in METHODS:
        near = did_you_mean(name, METHODS)
        raise PenstockError(f"no training method called {name!r}; wanted one of {', '.join(METHODS)}{near}")
    return METHODS[name]


@dataclass(frozen=True, slots=True)
class TrainJob:
    """What the ranks are asked to measure."""

    model: str  # a name of the zoo
    batch: int  # samples per rank; 0 is the zoo's own
    methods: tuple[str, ...]
    rounds: int
    iterations: int  # of each method and round
    warmup: int  # iterations of each method before the first round, profiling excepted
    profile: int  # iterations that planning methods profile
    threads: int  # of each rank
    nic: str = NIC
    device: str = "cpu"  # or cuda: this rank's GPU, and NCCL between ranks
    startup: bool = False  # time the one method until its plan is in force, and nothing else


@dataclass(slots=True)
class Subject:
    """One method at work."""

    name: str
    trained: Trained
    step: Callable[[], None]  # one iteration
    begun: float  # this rank's clock as its wrapper was made
    started: list[float] = field(default_factory=list)  # this rank's clock, one per round
    ended: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)  # sent by this host in an iteration, one per round


def train(job: TrainJob, done: Callable[[str], None] = lambda _: None) -> Iterator[dict[str, Any]]:
    """Measure every method and yield what all ranks agree on; every rank must call this with the same job."""
    torch.set_num_threads(job.threads)
    task = find_task(job.model)
    subjects: list[Subject] = []
    for name in job.methods:
        try:
            subjects.append(_prepare(job, task, name, subjects))
        except Exception as error:  # whatever a method raises here it raises on every rank: the others can go on
            yield {"method": name, "error": f"{type(error).__name__}: {error}"}
        done(name)
    for turn in range(job.rounds):
        for index in range(len(subjects)):
            subject = subjects[(turn + index) % len(subjects)]
            _measure(subject, job)
            done(subject.name)
    yield from _agree(subjects, job.batch or task.batch, job.iterations)


def start_up(job: TrainJob) -> dict[str, Any]:
    """Train by the job's one method until its plan is in force; return how long that took, the slowest rank's time.

    `ready_seconds` is from the making of the wrapper to the plan, profiled iterations included; `held_seconds` what of
    that training stood still. An iteration with the plan follows: a kernel that was not ready would show there.
    """
    (name,) = job.methods
    torch.set_num_threads(job.threads)
    task = find_task(job.model)
    subject = _begin(job, task, name, ())
    model = subject.trained.model
    assert isinstance(model, PlannedDataParallel)
    for _ in range(job.profile + 1):
        begun = perf_counter()
        subject.step()
    assert model.plan is not None, "no plan after as many iterations as are profiled"
    held = model.held_seconds
    first = perf_counter()
    subject.step()
    times = torch.tensor([begun - subject.begun + held, held, perf_counter() - first], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    ready, held, iteration = times.tolist()
    routes = ", ".join(dict.fromkeys(str(bucket.route) for bucket in model.plan.buckets))
    return {
        "method": name,
        "batch": job.batch or task.batch,
        "profiled": job.profile,
        "ready_seconds": ready,
        "held_seconds": held,
        "next_iteration_seconds": iteration,
        "routes": routes,
    }


def _prepare(job: TrainJob, task: Task, name: str, others: Sequence[Subject]) -> Subject:
    """Wrap a fresh module by the method called `name`, and run it until it is warm and has its plan."""
    subject = _begin(job, task, name, others)
    for _ in range(job.warmup + (job.profile if find_method(name).plans else 0)):
        subject.step()
    while isinstance(model := subject.trained.model, PlannedDataParallel) and model._planning.is_racing:
        subject.step()
    if subject.trained.finish:
        subject.trained.finish()
    return subject


def _begin(job: TrainJob, task: Task, name: str, others: Sequence[Subject]) -> Subject:
    """Wrap a fresh module by the method called `name`."""
    torch.manual_seed(1)  # same weights on every rank
    module = task.model().to(job.device)
    if others:
        _share_weights(module, others[0].trained.model)
    begun = perf_counter()
    trained = find_method(name).begin(module, job.profile)
    shard = Shard(dist.get_rank(), dist.get_world_size(), job.batch or task.batch, seed=1)
    data = to_device(next(task.batches(shard, 0)), torch.device(job.device))

    def step() -> None:
        task.loss(trained.model, data).backward()  # type: ignore[no-untyped-call]
        trained.update()

    return Subject(name, trained, step, begun)


def _share_weights(module: nn.Module, first: nn.Module) -> None:
    for mine, theirs in zip(module.parameters(), first.parameters(), strict=True):
        mine.data = theirs.data


def _measure(subject: Subject, job: TrainJob) -> None:
    """Run a block of iterations; the second barrier is there so that all of its bytes are counted.

    Where an update goes on during the next iteration, one more iteration before the clock starts brings it into that
    state: each timed one then waits for the update before it, and the last update is not timed, as the first was.
    """
    finish, device = subject.trained.finish, torch.device(job.device)
    dist.barrier()
    sent = sent_nbytes(job.nic)
    if finish:
        subject.step()
    synchronise(device)
    subject.started.append(perf_counter())
    for _ in range(job.iterations):
        subject.step()
    synchronise(device)
    subject.ended.append(perf_counter())
    if finish:
        finish()
    dist.barrier()
    subject.nbytes.append((sent_nbytes(job.nic) - sent) // (job.iterations + bool(finish)))


def _agree(subjects: Sequence[Subject], batch: int, iterations: int) -> Iterator[dict[str, Any]]:
    """Yield times of iterations and the busiest host's bytes."""
    for subject in subjects:
        busiest = torch.tensor(subject.nbytes)
        dist.all_reduce(busiest, dist.ReduceOp.MAX)
        plan = getattr(subject.trained.model, "plan", None)
        yield {
            "method": subject.name,
            "batch": batch,
            "seconds": iteration_seconds(subject.started, subject.ended, iterations),
            "nbytes": busiest.tolist(),
            "messages": len(plan.messages) if plan else None,
            "strategies": ", ".join(dict.fromkeys(str(bucket.route) for bucket in plan.buckets)) if plan else None,
            "predicted_seconds": (plan.iteration_seconds or None) if plan else None,
        }


def iteration_seconds(started: Sequence[float], ended: Sequence[float], iterations: int) -> list[float]:
    """Return the seconds of an iteration in each round: from the last rank's start to the last rank's end.

    Ranks whose updates go on during the next iteration do not start or end together. The slowest rank's own
    difference would add by how much its start was early to by how much its end was late, which is no time of any
    iteration. The clock is one: emulated hosts are one machine.
    """
    clocks = torch.tensor([list(started), list(ended)], dtype=torch.float64)
    dist.all_reduce(clocks, dist.ReduceOp.MAX)
    seconds: list[float] = ((clocks[1] - clocks[0]) / iterations).tolist()
    return seconds


def main() -> None:
    """Measure the job given as JSON on the command line."""
    document = json.loads(sys.argv[1])
    job = TrainJob(**document | {"methods": tuple(document["methods"])})
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join_group("cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo")
    rank = dist.get_rank()
    for result in [start_up(job)] if job.startup else train(job, lambda name: report(rank, {"done": name})):
        report(rank, result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
