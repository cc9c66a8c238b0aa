"""Trains by several methods and from several seeds at once, each run with several workers, all in one process.

All runs take a step together: `weights` has a row per run, gradients and residuals a row per run and worker. Momentum
is the paper's plain one, on the exchanged gradient, or DGC's corrected one; weight decay is always the optimizer's,
on all weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from penstock.bench.convergence.layout import Layout
from penstock.bench.convergence.method import WARMUP, Method, large_elements, make_exchange
from penstock.bench.convergence.networks import Statistics
from penstock.bench.convergence.sides import Sides
from penstock.bench.convergence.tasks import Recipe, Task
from penstock.bench.convergence.triton_segments import Segments

_FORGETTING = 0.1  # of running statistics, as torch has it


@dataclass(frozen=True, slots=True)
class Member:
    """One of the runs that train together."""

    method: Method
    seed: int


class Fleet:
    """Runs that train together; `step` computes and exchanges, on the device alone."""

    def __init__(
        self, task: Task, recipe: Recipe, methods: Sequence[Method], seeds: Sequence[int], workers: int, device: str
    ) -> None:
        self.task, self.recipe, self.workers, self.device = task, recipe, workers, device
        self.members = [Member(method, seed) for method in methods for seed in seeds]
        self.groups = {method: slice(at * len(seeds), (at + 1) * len(seeds)) for at, method in enumerate(methods)}
        self.model = task.model().to(device)
        self.layout = Layout.of(self.model)
        self.tensors = Segments.of(self.layout.sizes, device)
        self.weights = torch.stack([self._begin(member.seed) for member in self.members]).to(device)
        shape = (len(self.members), workers, self.weights.shape[1])
        self.residuals, self.velocity = torch.zeros(shape, device=device), torch.zeros_like(self.weights)
        self.corrected = {m: torch.zeros_like(self.residuals[at]) for m, at in self.groups.items() if m.corrected}
        self.sides = Sides.of(len(methods), device)
        self.compressed = {method: large_elements(method, self.tensors) for method in self.corrected}
        self.running: Statistics = {}
        self._draw(list(seeds), len(methods))
        self.enter_stage(0)

    def _begin(self, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return self.layout.pack(self.task.model())

    def _draw(self, seeds: list[int], methods: int) -> None:
        """Choose all examples of all steps beforehand, and the learning rates."""
        steps, batch, examples = self.recipe.steps, self.task.global_batch, self.task.examples
        chosen, noise = [], []
        for seed in seeds:
            generator = torch.Generator().manual_seed(1000 + seed)
            passes = math.ceil(steps / (examples // batch))
            order = [torch.randperm(examples, generator=generator)[: examples // batch * batch] for _ in range(passes)]
            chosen.append(torch.cat(order)[: steps * batch].view(steps, self.workers, -1))
            noise.append(torch.rand((*chosen[-1].shape, 3), generator=generator))
        self.chosen, self.noise = torch.stack(chosen).to(self.device), torch.stack(noise).to(self.device)
        self.seed_number = torch.arange(len(seeds), device=self.device).repeat(methods)
        step = torch.arange(steps)
        rising = torch.clamp((step + 1) / self.recipe.rising, max=1)
        rates = self.recipe.learning_rate * rising * 0.5 * (1 + torch.cos(math.pi * step / steps))
        factors = torch.tensor([member.method.rate for member in self.members])
        self.rates = (rates[:, None] * factors).to(self.device)
        self.losses = torch.zeros((steps, len(self.members)), device=self.device)
        self.now = torch.zeros(1, dtype=torch.long, device=self.device)

    def enter_stage(self, stage: int) -> None:
        """Take the densities of a stage of the warm-up; the last one stays."""
        densities = {method: method.density_at(stage) for method in self.groups}
        self.exchanges = {method: make_exchange(method, density, self.tensors) for method, density in densities.items()}

    def step(self) -> None:
        """Take one step with all runs."""
        gradients = self._gradients()
        factors = self._factors(gradients)
        rate = self.rates[self.now][0]
        self.velocity.mul_(self.recipe.momentum)
        if self.recipe.weight_decay:
            self.velocity.add_(self.weights, alpha=self.recipe.weight_decay)
        self.sides.run(
            [
                partial(
                    self._exchange, method, at, gradients[at], None if factors is None else factors[at], rate[at, None]
                )
                for method, at in self.groups.items()
            ]
        )
        self.weights.sub_(rate[:, None] * self.velocity)
        self.now += 1

    def _factors(self, gradients: torch.Tensor) -> torch.Tensor | None:
        """Return what local clipping multiplies each worker's gradient by, [run, worker, 1]; None: nothing."""
        if not self.recipe.clip:
            return None
        norms: torch.Tensor = torch.linalg.vector_norm(gradients, dim=-1, keepdim=True) / self.task.loss_scale
        return (self.recipe.clip / math.sqrt(self.workers) / norms).clamp(max=1)

    def _add(self, to: torch.Tensor, gradients: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        """Add gradients, clipped and without the loss's scale, in one pass."""
        if factors is None:
            return to.add_(gradients, alpha=1 / self.task.loss_scale)
        return to.addcmul_(gradients, factors, value=1 / self.task.loss_scale)

    def _gradients(self) -> torch.Tensor:
        """Return every worker's gradient, scaled; a worker's loss is the mean over its own examples."""
        chosen = self.chosen[self.seed_number, self.now.expand_as(self.seed_number)]
        noise = self.noise[self.seed_number, self.now.expand_as(self.seed_number)]
        inputs, wanted = self.task.batch(chosen, noise)
        leaf = self.weights[:, None].expand_as(self.residuals).detach().requires_grad_()
        seen: Statistics = {}
        logits = self.task.forward(inputs, self.layout.views(leaf), seen).float()
        losses = functional.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none")
        means = losses.view(*chosen.shape[:2], -1).mean(-1)
        self.losses[self.now] = means.detach().mean(1)
        self._follow(seen)
        return torch.autograd.grad(means.sum() * self.task.loss_scale, leaf)[0]

    def _follow(self, seen: Statistics) -> None:
        """Keep running statistics: the mean of what the workers see, as each of them would keep it."""
        for layer, both in seen.items():
            mean, variance = (each.unflatten(0, (len(self.members), -1)).mean(1) for each in both)
            if layer not in self.running:
                self.running[layer] = (torch.zeros_like(mean), torch.ones_like(variance))
            self.running[layer][0].lerp_(mean, _FORGETTING)
            self.running[layer][1].lerp_(variance, _FORGETTING)

    def _exchange(
        self, method: Method, at: slice, gradients: torch.Tensor, factors: torch.Tensor | None, rate: torch.Tensor
    ) -> None:
        local = self.corrected.get(method)
        if local is None:
            applied, _ = self.exchanges[method](self._add(self.residuals[at], gradients, factors))
            self.velocity[at].add_(applied, alpha=1 / self.workers)
            return
        self._add(local.mul_(self.recipe.momentum), gradients, factors)
        applied, residuals = self.exchanges[method](self.residuals[at].add_(local))
        waiting = residuals != 0
        waiting[..., self.compressed[method] :] = True
        local.mul_(waiting)  # what left for good loses its velocity; what travels dense keeps it
        self.weights[at].sub_(rate * applied, alpha=1 / self.workers)

    @torch.no_grad()
    def evaluate(self) -> list[float]:
        """Return every run's held-out metric, of the model itself."""
        self.model.eval()
        found = []
        for number, flat in enumerate(self.weights):
            self.layout.unpack(flat, self.model)
            for layer, (mean, variance) in self.running.items():
                norm = self.model.get_submodule(layer)
                norm.get_buffer("running_mean").copy_(mean[number])
                norm.get_buffer("running_var").copy_(variance[number])
            found.append(self.task.evaluate(self.model))
        return found

    def stage_starts(self) -> list[int]:
        """Return the steps at which a stage of the warm-up begins, and the one after it."""
        return [self.recipe.warmup * stage for stage in range(len(WARMUP) + 1)]
