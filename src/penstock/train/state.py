"""What a viewer knows of a job: the latest of everything that its events said."""

from dataclasses import dataclass, field
from typing import Any

from penstock.train.events import Event


@dataclass(slots=True)
class Seen:
    """The newest values of all events."""

    metric_name: str = "metric"
    step: int = 0
    latest: dict[str, Any] = field(default_factory=dict)
    metric: float | None = None
    losses: list[float] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Take over what an event says."""
        self.step = max(self.step, event.step)
        if event.kind == "ready":
            self.metric_name = event.values["metric_name"]
        elif event.kind == "evaluated":
            self.metric = event.values["metric"]
        elif event.kind == "steps":
            self.latest = event.values
            if event.values["loss"] is not None:
                self.losses.append(event.values["loss"])

    def words(self) -> dict[str, str]:
        """Return everything in words, by its name, in the order in which it is shown."""
        latest = self.latest
        if not latest:
            return {"state": "starting workers, profiling, planning"}
        return {
            "step": f"{self.step} of {latest['steps']}, {latest['seconds']:.0f} s",
            "loss": number(latest["loss"]),
            self.metric_name: number(self.metric),
            "speed": f"{number(latest['samples_per_second'])} samples/s",
            "iteration": split_words(latest),
            "sent": traffic_words(latest["bytes_per_iteration"], latest["dense_bytes_per_iteration"]),
            "plan": latest["plan"],
        }


def number(value: float | None) -> str:
    """Return a number with four digits, or what stands for one that is not known or not finite."""
    return "-" if value is None else f"{value:.4g}"


def split_words(values: dict[str, Any]) -> str:
    """Return an iteration in milliseconds: the whole, and what it is made of."""
    whole, compute, hidden, exposed = (
        None if values[name] is None else round(1e3 * values[name])
        for name in ("iteration_seconds", "compute_seconds", "hidden_seconds", "exposed_seconds")
    )
    known = "?" if hidden is None else hidden
    return f"{whole} ms = {compute} compute + {exposed} exposed communication ({known} hidden)"


def traffic_words(sent: float | None, dense: float | None) -> str:
    """Return bytes per worker and iteration, and what they are to dense ones."""
    if sent is None:
        return "-"
    ratio = f", {dense / sent:.1f}x less than dense" if dense and sent and dense / sent >= 1.05 else ""
    return f"{sent / 1e6:.3g} MB per worker and iteration{ratio}"
