"""Trains one model by one method with several workers in one process; on a GPU a step is one CUDA graph.

All parameters are views of one flat vector, and worker w's gradients are views of row w of a matrix. Momentum is the
paper's plain one, on the exchanged gradient: the same optimizer for all methods.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from penstock.bench.convergence.method import Method, exchange
from penstock.bench.convergence.quantised import Parts
from penstock.bench.convergence.tasks import Task

MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class Curve:
    """How a run went."""

    losses: list[float]  # mean training loss of each epoch
    metrics: list[float]  # after each epoch, on held-out data


class Run:
    """One training run; `step` computes and exchanges, on the device alone."""

    def __init__(self, task: Task, method: Method, workers: int, seed: int, device: str, epochs: int) -> None:
        self.task, self.method, self.workers, self.seed = task, method, workers, seed
        self.device, self.epochs, self.density = device, epochs, 1.0
        torch.manual_seed(seed)
        self.model = task.model().to(device).train()
        parameters = list(self.model.parameters())
        self.sizes = [parameter.numel() for parameter in parameters]
        self.weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.gradients = torch.zeros((workers, len(self.weights)), device=device)
        self.residuals, self.velocity = torch.zeros_like(self.gradients), torch.zeros_like(self.weights)
        index = torch.repeat_interleave(torch.tensor(self.sizes)).to(device)
        self.parts = Parts(index, torch.tensor(self.sizes, device=device))
        for parameter, view in zip(parameters, self._views(self.weights), strict=True):
            parameter.data = view
        self._draw()
        self.rounding = torch.Generator(device).manual_seed(seed)

    def _draw(self) -> None:
        """Choose all examples of all steps beforehand, and the learning rate (half a cosine, after one epoch up)."""
        generator = torch.Generator().manual_seed(1000 + self.seed)
        batch, examples = self.task.global_batch, self.task.examples
        self.steps = examples // batch
        order = [torch.randperm(examples, generator=generator)[: self.steps * batch] for _ in range(self.epochs)]
        shape = (self.epochs * self.steps, self.workers, batch // self.workers)
        self.chosen = torch.cat(order).view(shape).to(self.device)
        self.noise = torch.rand((*shape, 3), generator=generator).to(self.device)
        done = torch.arange(len(self.chosen)) / len(self.chosen)
        rising = torch.clamp((torch.arange(len(self.chosen)) + 1) / self.steps, max=1)
        self.rates = (self.task.learning_rate * rising * 0.5 * (1 + torch.cos(math.pi * done))).to(self.device)
        self.losses = torch.zeros(len(self.chosen), device=self.device)
        self.now = torch.zeros(1, dtype=torch.long, device=self.device)

    def _views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        shapes = [parameter.shape for parameter in self.model.parameters()]
        return (piece.view(shape) for piece, shape in zip(torch.split(flat, self.sizes), shapes, strict=True))

    def step(self) -> None:
        """Compute every worker's gradient, exchange, and update."""
        chosen, noise = self.chosen[self.now][0], self.noise[self.now][0]
        self.gradients.zero_()
        losses = [self._backward(worker, chosen[worker], noise[worker]) for worker in range(self.workers)]
        self.losses[self.now] = torch.stack(losses).mean()
        self._update()
        self.now += 1

    def _backward(self, worker: int, chosen: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        for parameter, view in zip(self.model.parameters(), self._views(self.gradients[worker]), strict=True):
            parameter.grad = view
        loss = self.task.loss(self.model, chosen, noise)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _update(self) -> None:
        gradients = self.gradients
        if self.task.clip:
            norms = gradients.norm(dim=1, keepdim=True)
            gradients = gradients * (self.task.clip / math.sqrt(self.workers) / norms).clamp(max=1)
        wanted = gradients + self.residuals
        applied, residuals = exchange(self.method, wanted, self.density, self.parts, self.sizes, self.rounding)
        self.residuals.copy_(residuals)
        self.velocity.mul_(MOMENTUM).add_(applied / self.workers + self.task.weight_decay * self.weights)
        self.weights.sub_(self.rates[self.now] * self.velocity)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the held-out metric."""
        self.model.eval()
        found = self.task.evaluate(self.model)
        self.model.train()
        return found


Stepper = Callable[[Run], Callable[[], None]]  # makes of a run, at its present density, something that does one step


def train(run: Run, stepper: Stepper, lock: AbstractContextManager[Any], evaluate_every: int = 1) -> Curve:
    """Train to the end, and judge every so many epochs and at the end; judging holds `lock`."""
    metrics: list[float] = []
    density, once = None, run.step
    for epoch, wanted in enumerate(run.method.densities(run.epochs)):
        if wanted != density:
            run.density = density = wanted
            once = stepper(run)
        for _ in range(run.steps):
            once()
        if (epoch + 1) % evaluate_every == 0 or epoch + 1 == run.epochs:
            with lock:
                metrics.append(run.evaluate())
    return Curve(run.losses.view(run.epochs, run.steps).mean(1).tolist(), metrics)


def step_by_step(run: Run) -> Callable[[], None]:
    """Return the plain step, for processors without graphs."""
    return run.step
