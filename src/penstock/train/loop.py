"""The training loop of one worker: steps, and between them reports, evaluations and checkpoints."""

import hashlib
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.cluster.processes import sent_nbytes
from penstock.errors import MismatchError
from penstock.planning.observed import communication_seconds
from penstock.run_record import Evaluation, Step
from penstock.torch.clocks import synchronise
from penstock.torch.collective_errors import GroupRanks, together
from penstock.torch.saved_folder import checkpoint_path
from penstock.train.events import Event, Tell, Wish
from penstock.train.job import Job, Saved
from penstock.train.method import Wrapped
from penstock.train.save_state import random_state, save_checkpoint, undisturbed
from penstock.train.update import Update
from penstock.zoo.task import Shard, Task, to_device


class Meter:
    """Bytes per iteration since the meter was made."""

    def __init__(self, wrapped: Wrapped, nic: str) -> None:
        """Start counting; with `nic`, the kernel's counter of that interface is read, headers included."""
        self._wrapped, self._nic = wrapped, nic
        self._before = wrapped.traffic()
        self._nic_before = sent_nbytes(nic) if nic else 0

    def per_iteration(self, iterations: int) -> tuple[float | None, float | None]:
        """Return the bytes sent, and those that a dense all-reduce would have sent."""
        if not iterations:
            return None, None
        now, before = self._wrapped.traffic(), self._before
        sent = sent_nbytes(self._nic) - self._nic_before if self._nic else now.sent_nbytes - before.sent_nbytes
        return sent / iterations, (now.dense_nbytes - before.dense_nbytes) / iterations


class Loop:
    """One run on one worker, from `step` on."""

    def __init__(self, job: Job, task: Task, wrapped: Wrapped, update: Update, shard: Shard, tell: Tell) -> None:
        self.job, self.task, self.wrapped, self.update, self.shard, self.tell = (
            job, task, wrapped, update, shard, tell,
        )  # fmt: skip
        self.device = next(wrapped.model.parameters()).device
        self.group = wrapped.model.process_group  # of the ranks that train
        self.step = 0
        self.history = History()
        self.computing_seconds = 0.0

    def run(self, wish: Wish) -> bool:
        """Train to the last step; return False where it was stopped before."""
        self.first, self.meter = self.step, Meter(self.wrapped, self.job.nic)
        batches = self.task.batches(self.shard, self.step * self.job.accumulate)
        if self.step == 0:
            self.evaluate()
        look = 1
        while self.step < self.job.steps:
            stop, seconds = self._steps(batches, min(look, self._until_due()), wish)
            self.report()
            if self.step % self._evaluate_every == 0 or self.step == self.job.steps:
                self.evaluate()
            if self.job.save and (stop or self.step == self.job.steps or self._save_is_due()):
                self.save()
            if stop:
                return False
            look = steps_until_look(seconds)
        return True

    def _steps(self, batches: Iterator[Any], count: int, wish: Wish) -> tuple[bool, float]:
        """Take `count` steps; return whether a stop was requested, and the mean seconds of a step."""
        losses, seconds = [], []
        for number in range(self.step + 1, self.step + count + 1):
            if number == self.job.steps:
                self.wrapped.record_instructions()  # the last iteration is the one that reports draw
            start = perf_counter()
            losses.append(self._one(batches, number))
            seconds.append(perf_counter() - start)
        mean, stop, mean_seconds = share(losses, bool(wish.made), sum(seconds) / count, self.group)
        self.history.add_steps(self.step + 1, mean, seconds)
        self.step += count
        timeline = self.wrapped.measured_timeline()
        if timeline is not None:
            self.history.communications.append(communication_seconds(timeline))
        return stop, mean_seconds

    def _one(self, batches: Iterator[Any], number: int) -> Tensor:
        start = perf_counter()
        taken = [to_device(next(batches), self.device) for _ in range(self.job.accumulate)]
        fetched = perf_counter()
        loss = self.update.gradients(self.task, self.wrapped.model, taken)
        synchronise(self.device)
        passed = perf_counter()
        self.update.apply(number)
        synchronise(self.device)
        self.history.updates.append(perf_counter() - passed + fetched - start)
        self.wrapped.count_iteration()
        return loss

    def report(self) -> None:
        """Tell how far it is."""
        sent, dense = self.meter.per_iteration(self.step - self.first)
        split = self.history.split(self.computing_seconds)
        whole, plan = split.iteration_seconds, self.wrapped.plan
        together = self.shard.batch * self.job.accumulate * self.shard.world_size
        values = {
            "steps": self.job.steps,
            "seconds": self.history.seconds,
            "loss": self.history.steps[-1].loss,
            **asdict(split),
            "samples_per_second": together / whole if whole else None,
            "bytes_per_iteration": sent,
            "dense_bytes_per_iteration": dense,
            "plan": f"{len(plan.messages)} messages by {plan.planner}" if plan else "torch's own buckets",
        }
        self.tell(Event("steps", self.step, values))

    def evaluate(self) -> None:
        """Measure the held-out metric on all ranks together; leaves generators and mode as they were."""
        module = self.wrapped.model.module
        same_buffers(module, self.group)
        module.eval()
        with torch.no_grad(), undisturbed():
            metric = mean_metric(*self.task.evaluate(module, self.shard), self.group)
        module.train()
        self.history.add_evaluation(self.step, metric)
        last = self.history.evaluations[-1]
        self.tell(Event("evaluated", self.step, {"seconds": last.seconds, "metric": last.metric}))

    def save(self) -> None:
        """Write a checkpoint."""
        common = {
            "model": self.wrapped.model.module.state_dict(),
            **self.update.state(),
            "history": self.history.state(),
        }
        own = {"exchange": self.wrapped.exchange_state(), "random": random_state()}
        path, world_size = checkpoint_path(self.job.save, self.step), self.shard.world_size
        plan, found = self.wrapped.plan, self.wrapped.found
        saved = Saved(path, self.step, self.history.seconds, world_size, self.job, plan, *found)
        save_checkpoint(saved, common, own, self.group)
        self.tell(Event("saved", self.step, {"path": str(path)}))

    @property
    def _evaluate_every(self) -> int:
        return self.job.evaluate_every or max(1, self.job.steps // 10)

    def _save_is_due(self) -> bool:
        return bool(self.job.save_every) and self.step % self.job.save_every == 0

    def _until_due(self) -> int:
        """Return the steps until the next evaluation, checkpoint or end."""
        every = [self._evaluate_every, *([self.job.save_every] if self.job.save and self.job.save_every else [])]
        return min(self.job.steps - self.step, *(each - self.step % each for each in every))


# What a run has seen so far: losses, metrics and the seconds of its iterations.


KEPT_ITERATIONS = 1000  # iterations whose times count for the medians


@dataclass(frozen=True, slots=True)
class Split:
    """What an iteration is made of."""

    iteration_seconds: float | None = None
    compute_seconds: float | None = None  # without communication
    hidden_seconds: float | None = None  # communication while computing
    exposed_seconds: float | None = None  # communication that computing does not hide


@dataclass(slots=True)
class History:
    """Grows while training goes on; rank 0's goes into reports and, whole, into checkpoints."""

    seconds: float = 0.0  # of training so far, evaluations and checkpoints excluded
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    iterations: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_ITERATIONS))  # whole iterations
    updates: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_ITERATIONS))  # of these: optimizer and data
    communications: deque[float] = field(
        default_factory=lambda: deque(maxlen=KEPT_ITERATIONS)
    )  # of some: communication at all

    def add_steps(self, first: int, losses: list[float], seconds: list[float]) -> None:
        """Add iterations `first`, `first + 1`, ... with their mean losses and times."""
        for step, (loss, took) in enumerate(zip(losses, seconds, strict=True), start=first):
            self.seconds += took
            self.steps.append(Step(step, self.seconds, finite(loss)))
            self.iterations.append(took)

    def add_evaluation(self, step: int, metric: float) -> None:
        """Add the held-out metric after `step`."""
        self.evaluations.append(Evaluation(step, self.seconds, finite(metric)))

    def split(self, computing_seconds: float) -> Split:
        """Return an iteration's seconds: whole, computing, communication that is hidden, and that is not.

        Computing is the passes alone plus data and optimizer, but not more than the whole: passes were measured before
        the first iteration, where they may be slower. Exposed is what the iteration takes beyond that, hidden what
        communication takes beyond the exposed part.
        """
        if not self.iterations:
            return Split()
        whole = median(self.iterations)
        compute = min(whole, computing_seconds + (median(self.updates) if self.updates else 0.0))
        exposed = whole - compute
        hidden = max(0.0, median(self.communications) - exposed) if self.communications else None
        return Split(whole, compute, hidden, exposed)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "steps": [(each.step, each.seconds, each.loss) for each in self.steps],
            "evaluations": [(each.step, each.seconds, each.metric) for each in self.evaluations],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self.steps = [Step(*_moment(*each)) for each in state["steps"]]
        self.evaluations = [Evaluation(*_moment(*each)) for each in state["evaluations"]]
        self.seconds = self.steps[-1].seconds if self.steps else 0.0


def _moment(step: int, seconds: float, value: float | None) -> tuple[int, float, float | None]:
    return int(step), float(seconds), None if value is None else float(value)


def finite(value: float) -> float | None:
    """Return the value, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


# The few collectives by which ranks keep in step outside the gradients: losses, wishes to stop, metrics, weights.


LOOK_SECONDS = 0.5  # between looks at whether a stop was requested
MOST_STEPS = 100  # between looks


def share(
    losses: list[Tensor], wants_to_stop: bool, seconds: float, group: dist.ProcessGroup | None = None
) -> tuple[list[float], bool, float]:
    """Return the losses averaged over ranks, whether any rank wants to stop, and the seconds averaged over ranks."""
    own = torch.stack([loss.detach().double().cpu() for loss in losses])
    box = torch.cat([own, torch.tensor([float(wants_to_stop), seconds], dtype=torch.float64)])
    with together("sharing losses", group):
        dist.all_reduce(box, group=group)
    *mean, stop, mean_seconds = (box / dist.get_world_size(group)).tolist()
    return mean, stop > 0, mean_seconds


def steps_until_look(seconds_per_step: float) -> int:
    """Return after how many steps to look again; all ranks were given the same seconds."""
    return max(1, min(MOST_STEPS, int(LOOK_SECONDS / max(seconds_per_step, 1e-6))))


def mean_metric(total: float, count: float, group: dist.ProcessGroup | None = None) -> float:
    """Return the metric over all ranks' parts."""
    box = torch.tensor([total, count], dtype=torch.float64)
    with together("sharing a metric", group):
        dist.all_reduce(box, group=group)
    return float(box[0] / box[1])


def same_buffers(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give all ranks rank 0's buffers, as torch's wrapper does before each forward pass: one model is evaluated."""
    with together("sharing buffers", group):
        for buffer in module.buffers():
            dist.broadcast(buffer, 0, group=group)


def same_weights(module: nn.Module, group: dist.ProcessGroup | None = None) -> str:
    """Return the digest of all parameters; raise on every rank unless all ranks of a group hold the same bits."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    found = GroupRanks(group).gather(digest.hexdigest(), "comparing weights")
    if len(set(found)) > 1:
        apart = next(rank for rank, each in enumerate(found) if each != found[0])
        raise MismatchError(f"rank {apart} ended with other weights than rank 0; please report this")
    return str(found[0])
