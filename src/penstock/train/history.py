"""What a run has seen so far: losses, metrics and the seconds of its iterations."""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from penstock.run_record import Evaluation, Step

KEPT = 1000  # iterations whose times count for the medians


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
    iterations: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # whole iterations
    updates: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # of these: optimizer and data
    communications: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # of some: communication at all

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

        Computing is the passes alone plus data and optimizer. Exposed is what the iteration takes beyond that, hidden
        what communication takes beyond the exposed part.
        """
        if not self.iterations:
            return Split()
        whole = median(self.iterations)
        compute = computing_seconds + (median(self.updates) if self.updates else 0.0)
        exposed = max(0.0, whole - compute)
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
        self.steps = [Step(*each) for each in state["steps"]]
        self.evaluations = [Evaluation(*each) for each in state["evaluations"]]
        self.seconds = self.steps[-1].seconds if self.steps else 0.0


def finite(value: float) -> float | None:
    """Return the value, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None
