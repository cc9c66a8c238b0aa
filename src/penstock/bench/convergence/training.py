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
        self.parts = Parts.of([parameter.numel() for parameter in parameters], device)
        self.weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.gradients = torch.zeros((workers, len(self.weights)), device=device)
        self.residuals, self.velocity = torch.zeros_like(self.gradients), torch.zeros_like(self.weights)
        for parameter, view in zip(parameters, self._views(self.weights).values(), strict=True):
            parameter.data = view
        self.buffers = {name: buffer.expand(workers, *buffer.shape).clone() for name, buffer in self._named_buffers()}
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

    def _views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each parameter's place in a vector, or in every row of a matrix."""
        pieces = zip(self.model.named_parameters(), torch.split(flat, list(self.parts.sizes), dim=-1), strict=True)
        return {name: piece.view(*flat.shape[:-1], *parameter.shape) for (name, parameter), piece in pieces}

    def _named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.model.named_buffers()

    def compute(self) -> None:
        """Compute every worker's gradient."""
        chosen, noise = self.chosen[self.now][0], self.noise[self.now][0]
        losses = self._together(chosen, noise) if self.task.together else self._in_turn(chosen, noise)
        self.losses[self.now] = losses.mean()

    def _together(self, chosen: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Run all workers' passes as one: every worker has a copy of the weights, and so a gradient of its own."""
        inputs, wanted = self.task.batch(chosen.flatten(), noise.flatten(0, 1))
        shape = chosen.shape
        copies = self.weights.expand_as(self.gradients).clone().requires_grad_()

        def one(parameters: Any, buffers: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            outputs = torch.func.functional_call(self.model, (parameters, buffers), (x,))
            return self.task.criterion(outputs, y)

        x, y = inputs.view(*shape, *inputs.shape[1:]), wanted.view(*shape, *wanted.shape[1:])
        losses: torch.Tensor = torch.func.vmap(one)(self._views(copies), self.buffers, x, y)
        self.gradients.copy_(torch.autograd.grad(losses.sum(), copies)[0])
        return losses.detach()

    def _in_turn(self, chosen: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        self.gradients.zero_()
        losses = []
        for worker in range(self.workers):
            views = self._views(self.gradients[worker])
            for name, parameter in self.model.named_parameters():
                parameter.grad = views[name]
            inputs, wanted = self.task.batch(chosen[worker], noise[worker])
            loss = self.task.criterion(self.model(inputs), wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses)

    def update(self) -> None:
        """Exchange the gradients and change the weights."""
        gradients = self.gradients
        if self.task.clip:
            norms = gradients.norm(dim=1, keepdim=True)
            gradients = gradients * (self.task.clip / math.sqrt(self.workers) / norms).clamp(max=1)
        wanted = gradients + self.residuals
        applied, residuals = exchange(self.method, wanted, self.density, self.parts, self.rounding)
        self.residuals.copy_(residuals)
        self.velocity.mul_(MOMENTUM).add_(applied / self.workers + self.task.weight_decay * self.weights)
        self.weights.sub_(self.rates[self.now] * self.velocity)
        self.now += 1

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the held-out metric, with the mean of the workers' running statistics."""
        for name, buffer in self._named_buffers():
            if self.task.together and buffer.is_floating_point():
                buffer.copy_(self.buffers[name].mean(0))
        self.model.eval()
        found = self.task.evaluate(self.model)
        self.model.train()
        return found


Graph = Callable[[Callable[[], None]], Callable[[], None]]  # makes something faster of work that repeats


def train(run: Run, graph: Graph, lock: AbstractContextManager[Any], evaluate_every: int = 1) -> Curve:
    """Train to the end, and judge every so many epochs and at the end; judging holds `lock`."""
    metrics: list[float] = []
    compute, update, density = graph(run.compute), run.update, None
    for epoch, wanted in enumerate(run.method.densities(run.epochs)):
        if wanted != density:
            run.density = density = wanted
            update = graph(run.update)
        for _ in range(run.steps):
            compute()
            update()
        if (epoch + 1) % evaluate_every == 0 or epoch + 1 == run.epochs:
            with lock:
                metrics.append(run.evaluate())
    return Curve(run.losses.view(run.epochs, run.steps).mean(1).tolist(), metrics)
