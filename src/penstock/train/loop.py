"""The training loop of one worker: steps, and between them reports, evaluations and checkpoints."""

from collections.abc import Iterator
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from penstock.cluster.processes import sent_nbytes
from penstock.planning.measured import communication_seconds
from penstock.train.agree import mean_metric, same_buffers, share, steps_until_look
from penstock.train.events import Event, Tell
from penstock.train.history import History
from penstock.train.job import Job
from penstock.train.method import Wrapped
from penstock.train.randomness import random_state, undisturbed
from penstock.train.save_state import checkpoint_path, save_checkpoint
from penstock.train.saved import Saved
from penstock.train.settle import synchronise
from penstock.train.stop_request import Wish
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

    def __init__(
        self, job: Job, task: Task, wrapped: Wrapped, optimizer: torch.optim.Optimizer, shard: Shard, tell: Tell
    ) -> None:
        self.job, self.task, self.wrapped, self.optimizer, self.shard, self.tell = (
            job, task, wrapped, optimizer, shard, tell,
        )  # fmt: skip
        self.device = next(wrapped.model.parameters()).device
        self.step = 0
        self.history = History()
        self.computing_seconds = 0.0

    def run(self, wish: Wish) -> bool:
        """Train to the last step; return False where it was stopped before."""
        self.first, self.meter = self.step, Meter(self.wrapped, self.job.nic)
        batches = self.task.batches(self.shard, self.step)
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
            losses.append(self._one(batches))
            seconds.append(perf_counter() - start)
        mean, stop, mean_seconds = share(losses, bool(wish.made), sum(seconds) / count)
        self.history.add_steps(self.step + 1, mean, seconds)
        self.step += count
        timeline = self.wrapped.measured_timeline()
        if timeline is not None:
            self.history.communications.append(communication_seconds(timeline))
        return stop, mean_seconds

    def _one(self, batches: Iterator[Any]) -> Tensor:
        start = perf_counter()
        batch = to_device(next(batches), self.device)
        fetched = perf_counter()
        loss = self.task.loss(self.wrapped.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        synchronise(self.device)
        passed = perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronise(self.device)
        self.history.updates.append(perf_counter() - passed + fetched - start)
        self.wrapped.count_iteration()
        return loss

    def report(self) -> None:
        """Tell how far it is."""
        sent, dense = self.meter.per_iteration(self.step - self.first)
        split = self.history.split(self.computing_seconds)
        whole, plan = split.iteration_seconds, self.wrapped.plan
        together = self.shard.batch * self.shard.world_size
        values = {
            "steps": self.job.steps,
            "seconds": self.history.seconds,
            "loss": self.history.steps[-1].loss,
            **asdict(split),
            "samples_per_second": together / whole if whole else None,
            "bytes_per_iteration": sent,
            "dense_bytes_per_iteration": dense,
            "plan": f"{len(plan.buckets)} messages by {plan.planner}" if plan else "torch's own buckets",
        }
        self.tell(Event("steps", self.step, values))

    def evaluate(self) -> None:
        """Measure the held-out metric on all ranks together; leaves generators and mode as they were."""
        module = self.wrapped.model.module
        same_buffers(module)
        module.eval()
        with torch.no_grad(), undisturbed():
            metric = mean_metric(*self.task.evaluate(module, self.shard))
        module.train()
        self.history.add_evaluation(self.step, metric)
        last = self.history.evaluations[-1]
        self.tell(Event("evaluated", self.step, {"seconds": last.seconds, "metric": last.metric}))

    def save(self) -> None:
        """Write a checkpoint."""
        common = {
            "model": self.wrapped.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.history.state(),
        }
        own = {"exchange": self.wrapped.exchange_state(), "random": random_state()}
        path, world_size = checkpoint_path(self.job.save, self.step), self.shard.world_size
        plan, found = self.wrapped.plan, self.wrapped.found
        save_checkpoint(Saved(path, self.step, self.history.seconds, world_size, self.job, plan, *found), common, own)
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
