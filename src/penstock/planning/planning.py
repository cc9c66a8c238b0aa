"""What a user asks of planning (`Planning`), the same with files read and values checked (`Settings`), and what is
decided in the end (`Decision`)."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, TypeVar

from penstock.errors import PlanError, did_you_mean
from penstock.exchange.compression import AUTO, COMPRESSED_ONLY, SPARSE_STRATEGIES
from penstock.network import Network, load_network
from penstock.plan import Plan, load_plan
from penstock.planning.measurement_cache import measurement_folder
from penstock.strategies import names, parse_strategy
from penstock.trace import Trace, load_trace

WARMUP = 1  # profiled iterations that do not count: memory and connections are new
File = str | os.PathLike[str]
PlannerName = Literal["naive", "wfbp", "single", "threshold", "greedy", "exact", "selective", "joint"]
Value = TypeVar("Value", Network, Trace, Plan)


@dataclass(frozen=True, slots=True)
class Planning:
    """How messages are planned; `network`, `trace` and `plan` replace measuring, profiling and planning.

    Bad values raise `PlanError` when a wrapper takes it, misspelt names `TypeError`.
    """

    planner: PlannerName = "exact"  # naive, wfbp, single, threshold, greedy, exact, selective or joint
    strategy: str = "auto"  # "native": the engine's own all-reduce; a strategy's name; "auto": chosen for each bucket
    network: Network | File | None = None  # value or file, of as many ranks; None: measure
    trace: Trace | File | None = None  # value or file, of this model; None: profile
    plan: Plan | File | None = None  # value or file, of this model and as many ranks; None: plan
    measurements: File | bool | None = None  # folder of measured networks; None: the platform's; False: none is kept
    measure_seconds: float = 10.0  # that measuring may take, once
    profile_iterations: int = 5  # synchronised iterations to profile
    replan_drift: float = 0.0  # part that communication may differ from the prediction; 0: never plan again
    bulk: bool = True  # buckets in a row travel as one message where that pays; False: each by itself
    race: bool | None = None  # plans of about the same prediction are run in turn, the fastest is kept; None: if it can

    def settings(self, engine: str | None = None, races: bool = True) -> "Settings":
        """Return the same with files read; refuse bad values, and a race where a wrapper does not run any (`races`)."""
        if self.race and not races:
            raise PlanError(
                "race=True: this wrapper keeps the plan that is predicted to be best and runs no others in turn, as "
                "penstock.torch.DistributedDataParallel does; leave race out"
            )
        settings = Settings(
            self.planner,
            self.strategy,
            _loaded(self.network, load_network),
            _loaded(self.trace, load_trace),
            _loaded(self.plan, load_plan),
            measurement_folder(self.measurements),
            self.measure_seconds,
            self.profile_iterations,
            self.replan_drift,
            engine,
            self.bulk,
            races if self.race is None else self.race,
        )
        settings.check()
        return settings


class PlanningOptions(TypedDict, total=False):
    """The fields of a `Planning` as keywords of a wrapper, for type checkers; each wrapper has its own `strategy`."""

    planner: PlannerName
    network: Network | File | None
    trace: Trace | File | None
    plan: Plan | File | None
    measurements: File | bool | None
    measure_seconds: float
    profile_iterations: int
    replan_drift: float
    bulk: bool
    race: bool | None


def _loaded(given: Value | File | None, load: Callable[[File], Value]) -> Value | None:
    """Return a value that was given, or read it from the file that was."""
    return load(given) if isinstance(given, str | os.PathLike) else given


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user asked of planning."""

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
    bulk: bool = True  # buckets in a row may travel as one message
    race: bool = True  # plans that are predicted to take about as long are run in turn

    @property
    def options(self) -> dict[str, str]:
        """What all ranks must have asked for, as text."""
        named = (
            "planner",
            "strategy",
            "profile_iterations",
            "measure_seconds",
            "replan_drift",
            "engine",
            "bulk",
            "race",
        )
        keeps = "a folder" if self.measurements is not None else "None"  # each rank may have another one
        return {name: repr(getattr(self, name)) for name in named} | {"measurements": keeps}

    def check(self) -> None:
        """Refuse bad options before any iteration."""
        check_options(self.planner, self.strategy)
        iterations, drift = self.profile_iterations, self.replan_drift
        if not isinstance(iterations, int) or iterations <= WARMUP:
            raise PlanError(f"profile_iterations is {iterations!r}; wanted a whole number, at least {WARMUP + 1}")
        if not isinstance(self.measure_seconds, int | float) or not 0 < self.measure_seconds < float("inf"):
            raise PlanError(f"measure_seconds is {self.measure_seconds!r}; wanted a number of seconds, more than 0")
        if not isinstance(drift, int | float) or not 0 <= drift < float("inf"):
            raise PlanError(f"replan_drift is {drift!r}; wanted 0 (off) or a part such as 0.3")
        for name in ("bulk", "race"):
            if not isinstance(given := getattr(self, name), bool):
                raise PlanError(f"{name} is {given!r}; wanted True or False")
        for name, kind in (("network", Network), ("trace", Trace), ("plan", Plan)):
            if not isinstance(given := getattr(self, name), kind | None):
                raise PlanError(f"{name} is {given!r}; wanted a {kind.__name__}, the path of a file, or None")


def check_options(planner: str, strategy: str) -> None:
    """Refuse unknown names before any iteration runs."""
    from penstock.planners import find_planner  # with all planners, which a communication hook does without

    find_planner(planner)
    if strategy != AUTO:
        check_strategy(strategy, AUTO)


def check_strategy(strategy: str, *others: str) -> None:
    """Refuse an unknown all-reduce; `others` are named as wanted too."""
    known = (*others, *names("all_reduce"), *COMPRESSED_ONLY, *SPARSE_STRATEGIES)
    name, options = parse_strategy(strategy) if isinstance(strategy, str) else (strategy, {})
    for each in (name, *filter(None, (options.get("inner"), options.get("outer")))):
        if each not in known:
            near = did_you_mean(each, known)
            raise PlanError(f"no all-reduce strategy called {each!r}; wanted one of {', '.join(known)}{near}")


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan, what it was made from, and what the alternatives would have cost."""

    plan: Plan
    trace: Trace | None = None
    network: Network | None = None
    alternatives: tuple[tuple[str, float], ...] = ()  # (planner, iteration in seconds), its own too, without slowdown
    reason: str = ""  # why compression is on or off, where that was to be decided
    notes: tuple[str, ...] = ()  # what else a user should know of the codecs
    slowdown: float = 1.0  # times as long as `network` says messages take while gradients are computed
    rivals: tuple[Plan, ...] = ()  # other plans, predicted to take about as long: which is faster, iterations tell
