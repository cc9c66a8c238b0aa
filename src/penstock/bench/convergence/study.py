"""Trains fleets to the end, judges them on the way, and tells how each run went."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.bench.convergence.training import Fleet

_EAGER_STEPS = 3  # before capturing: libraries choose their kernels in them


@dataclass(slots=True)
class Stepper:
    """Takes steps; on a GPU by replaying a CUDA graph, which costs one launch instead of hundreds."""

    fleet: Fleet
    graph: torch.cuda.CUDAGraph | None = None
    calls: int = 0

    def __call__(self) -> None:
        """Take one step."""
        self.calls += 1
        if self.fleet.device != "cuda" or self.calls <= _EAGER_STEPS:
            self.fleet.step()
            return
        if self.graph is None:
            self.graph = _capture(self.fleet.step)  # captured, not yet run
        self.graph.replay()


def _capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    # On the fleet's own stream: graphs captured on one stream would share its workspace for matrix products.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        work()
    return graph


@dataclass(slots=True)
class Course:
    """A fleet's way to the end, step by step, on a stream of its own."""

    fleet: Fleet
    judged: int  # how often
    stream: torch.cuda.Stream | None = None
    curve: list[tuple[int, list[float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.fleet.device == "cuda":
            torch.cuda.synchronize()
            self.stream = torch.cuda.Stream()

    def walk(self) -> Iterator[None]:
        """Take all steps, judging on the way; yield after each."""
        starts, steps = self.fleet.stage_starts(), self.fleet.recipe.steps
        at = {round(steps * (number + 1) / self.judged) for number in range(self.judged)}
        stepper = Stepper(self.fleet)
        for step in range(steps):
            if step in starts:
                self._finish()
                self.fleet.enter_stage(starts.index(step))
                stepper = Stepper(self.fleet)
            stepper()
            if step + 1 in at:
                self.curve.append((step + 1, self.fleet.evaluate()))
            yield

    def _finish(self) -> None:
        """Wait for what was launched: a stage takes the last one's graph and tables away."""
        if self.stream:
            self.stream.synchronize()


def train(
    fleets: Sequence[Fleet], judged: int, seconds: float, say: Callable[[str], None],
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train all fleets side by side to the end or until `seconds` have passed, and return a row per run.

    Each has a stream: small kernels of one fill the gaps of the other. `keep` gets all rows so far when a fleet was
    judged: a study that is cut off leaves those.
    """
    begun = time.monotonic()
    courses = [Course(fleet, judged) for fleet in fleets]
    walks = [(course, course.walk()) for course in courses]
    while walks and time.monotonic() - begun < seconds:
        for course, walk in list(walks):
            seen = len(course.curve)
            with torch.cuda.stream(course.stream) if course.stream else nullcontext():
                if next(walk, walk) is walk:
                    walks.remove((course, walk))
            if len(course.curve) > seen:
                say(f"{time.monotonic() - begun:.0f} s, {course.fleet.workers} workers: {_progress(course)}")
                keep(_all_rows(courses))
    return _all_rows(courses)


def _all_rows(courses: Sequence[Course]) -> list[dict[str, Any]]:
    return [row for course in courses if course.curve for row in rows(course.fleet, course.curve)]


def _progress(course: Course) -> str:
    step, found = course.curve[-1]
    return f"step {step} of {course.fleet.recipe.steps}: {min(found):.4f} to {max(found):.4f}"


def seconds_per_step(fleets: Sequence[Fleet], steps: int = 20) -> float:
    """Return how long a step of all fleets takes on average, stages of the warm-up counted as long as they are.

    The fleets are spoilt by it.
    """
    streams = [Course(fleet, 1).stream for fleet in fleets]
    recipe, stages = fleets[0].recipe, len(fleets[0].stage_starts()) - 1
    taken = [_seconds_of_stage(fleets, streams, stage, steps) for stage in range(stages + 1)]
    share = min(recipe.warmup / recipe.steps, 1 / stages)
    return share * sum(taken[:-1]) + (1 - share * stages) * taken[-1]


def _seconds_of_stage(
    fleets: Sequence[Fleet], streams: Sequence[torch.cuda.Stream | None], stage: int, steps: int
) -> float:  # fmt: skip
    steppers = [Stepper(fleet) for fleet in fleets]
    for fleet in fleets:
        fleet.enter_stage(stage)

    def take(number: int) -> float:
        begun = time.monotonic()
        for _ in range(number):
            for stepper, stream in zip(steppers, streams, strict=True):
                with torch.cuda.stream(stream) if stream else nullcontext():
                    stepper()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.monotonic() - begun

    take(_EAGER_STEPS + 4)
    return take(steps) / steps


def rows(fleet: Fleet, curve: list[tuple[int, list[float]]]) -> list[dict[str, Any]]:
    """Return what is kept of every run."""
    task, recipe, losses = fleet.task, fleet.recipe, fleet.losses[: curve[-1][0]].tensor_split(len(curve))
    means = torch.stack([part.mean(0) for part in losses]).T.tolist()
    return [
        {
            "task": task.name, "method": member.method.name, "workers": fleet.workers, "seed": member.seed,
            "metric_name": task.metric, "better": task.better, "global_batch": task.global_batch,
            "steps": curve[-1][0], "planned_steps": recipe.steps,
            "learning_rate": recipe.learning_rate * member.method.rate, "rising": recipe.rising,
            "warmup": recipe.warmup, "momentum": recipe.momentum, "weight_decay": recipe.weight_decay,
            "clip": recipe.clip, "dense_below": member.method.dense_below,
            "judged_at": [step for step, _ in curve], "losses": [_finite(round(loss, 4)) for loss in means[number]],
            "metrics": [_finite(found[number]) for _, found in curve], "final": _finite(curve[-1][1][number]),
        }
        for number, member in enumerate(fleet.members)
    ]  # fmt: skip


def _finite(value: float) -> float | None:
    """Return a number, or nothing where a run has diverged: records hold no infinities."""
    return value if math.isfinite(value) else None
