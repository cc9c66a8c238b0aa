"""Notices when communication takes longer, or less long, than the plan in force predicts, for a while."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

WINDOW = 20  # iterations that are looked at together
LONGEST = 64  # windows between two plans, once planning again did not help


@dataclass(frozen=True, slots=True)
class Replanned:
    """One time that drift led to a new plan."""

    iteration: int  # since the first plan
    measured_seconds: float  # communication, median of a window
    predicted_seconds: float  # communication, by the plan in force until then
    plan_hash: str  # of the plan from then on


@dataclass(slots=True)
class Drift:
    """What rank 0 knows of the plan in force; the other ranks only count iterations.

    After a plan that drift led to, the next one needs twice as many windows: where a prediction is wrong for reasons
    that measuring again does not mend, measuring again and again would only cost time.
    """

    limit: float  # part of the prediction that the measured time may differ by
    predicted_seconds: float = 0.0
    iterations: int = 0  # since the first plan
    patience: int = 1  # windows to wait
    seen: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    history: list[Replanned] = field(default_factory=list)

    def note(self, communication_seconds: float | None) -> None:
        """Take one iteration's communication; None where it was not measured."""
        self.iterations += 1
        if communication_seconds is not None:
            self.seen.append(communication_seconds)

    @property
    def is_due(self) -> bool:
        """Is it time to ask rank 0? The same on all ranks."""
        return self.iterations > 0 and self.iterations % (WINDOW * self.patience) == 0

    @property
    def drifted(self) -> bool:
        """Has the communication of the last iterations drifted from the plan's?"""
        if len(self.seen) < WINDOW // 2:
            return False
        return abs(median(self.seen) - self.predicted_seconds) > self.limit * self.predicted_seconds

    def replanned(self, plan_hash: str, predicted_seconds: float) -> None:
        """Begin again with a new plan."""
        measured = median(self.seen) if self.seen else 0.0
        self.history.append(Replanned(self.iterations, measured, self.predicted_seconds, plan_hash))
        self.patience = min(2 * self.patience, LONGEST)
        self.predicted_seconds = predicted_seconds
        self.seen.clear()
