"""What a user asked of a wrapper about planning, and what is refused of it before any iteration."""

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PlanError
from penstock.network import Network
from penstock.plan import Plan
from penstock.planning.decide import check_options
from penstock.torch.engines import check_engine
from penstock.trace import Trace

WARMUP = 1  # profiled iterations that do not count: memory and connections are new


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user asked of a wrapper."""

    planner: str
    strategy: str
    network: Network | None  # None: measure
    trace: Trace | None  # None: profile
    plan: Plan | None  # None: plan
    measurements: Path | None  # folder of measured networks; None: none is kept
    measure_seconds: float  # that measuring may take
    profile_iterations: int
    replan_drift: float  # 0: never plan again
    engine: str | None = None  # what carries gradients; None: the process group

    @property
    def options(self) -> dict[str, str]:
        """What all ranks must have asked for, as text."""
        named = ("planner", "strategy", "profile_iterations", "measure_seconds", "replan_drift", "engine")
        keeps = "a folder" if self.measurements is not None else "None"  # each rank may have another one
        return {name: repr(getattr(self, name)) for name in named} | {"measurements": keeps}

    def check(self) -> None:
        """Refuse bad options before any iteration."""
        check_options(self.planner, self.strategy)
        check_engine(self.engine)
        iterations, drift = self.profile_iterations, self.replan_drift
        if not isinstance(iterations, int) or iterations <= WARMUP:
            raise PlanError(f"profile_iterations is {iterations!r}; wanted a whole number, at least {WARMUP + 1}")
        if not isinstance(self.measure_seconds, int | float) or not 0 < self.measure_seconds < float("inf"):
            raise PlanError(f"measure_seconds is {self.measure_seconds!r}; wanted a number of seconds, more than 0")
        if not isinstance(drift, int | float) or not 0 <= drift < float("inf"):
            raise PlanError(f"replan_drift is {drift!r}; wanted 0 (off) or a part such as 0.3")
        for name, kind in (("network", Network), ("trace", Trace), ("plan", Plan)):
            if not isinstance(given := getattr(self, name), kind | None):
                raise PlanError(f"{name} is {given!r}; wanted a {kind.__name__}, the path of a file, or None")
