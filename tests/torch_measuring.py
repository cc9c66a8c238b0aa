"""What each process of a test does that measures: the network, timelines, and communication that drifts."""

import itertools
import logging
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import FitError
from penstock.log import Voice
from penstock.network import LinearCost, Network
from penstock.plan import Route, parse_route
from penstock.planning import survey as surveying
from penstock.planning.choose import Choice
from penstock.planning.survey import Question, Survey
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch import device_measure, wrapper_planning
from penstock.torch.collective_errors import GroupRanks
from penstock.torch.device_measure import device_link_holds, measure_all_reduce, measure_device_links
from penstock.trace import Tensor, Trace
from torch_training import MODELS, _loss, plain, quick


def drift_away(rank: int) -> tuple[str, str, str, bool]:
    """Plan for a network where startups take a second, and let the wrapper find out that they do not."""
    lines = {"native": LinearCost(1.0, 1e-9)}
    wrapper = OurDDP(
        plain(),
        strategy="native",
        network=Network(2, 1.0, 1e-9, 1e-10, lines),
        profile_iterations=2,
        replan_drift=0.5,
    )
    hashes = []
    measured, survey = Network(2, 0.0, 1e-6, 1e-10, {"native": LinearCost(0.0, 1e-6)}), wrapper._planning._survey
    wrapper._planning._survey = lambda given: survey(given) if given else (measured, (Route("native"),))
    for step in range(26):
        _loss(wrapper, rank, step, {}).backward()
        hashes.append(wrapper.plan.hash if wrapper.plan else "")
    weights = next(wrapper.parameters()).detach().clone()
    mine = weights.clone()
    dist.broadcast(weights, 0)
    return hashes[4], hashes[-1], wrapper.explain(), torch.equal(mine, weights)


def raced(rank: int, iterations: int) -> tuple[list[str], str, bool]:
    """Let a plan of a message for each tensor race one of a single message; return the plan of each iteration."""
    wrapper = OurDDP(plain(), planner="wfbp", strategy="ring", bulk=False, profile_iterations=2, measurements=False)
    planning, network = wrapper._planning, Network(2, 1e-5, 1e-9, 1e-10)
    decide = planning._decide

    def with_rival(found: Network, routes: tuple[Route, ...]) -> Any:
        decision = decide(found, routes)
        return replace(decision, rivals=(replace(decision.plan, bulks=(len(decision.plan.buckets),)),))

    planning._survey = lambda _: (network, (Route("ring"),))
    planning._decide = with_rival
    hashes = []
    for step in range(iterations):
        _loss(wrapper, rank, step, {}).backward()
        hashes.append(wrapper.plan.hash if wrapper.plan else "")
    weights = next(wrapper.parameters()).grad
    assert weights is not None
    theirs = weights.clone()
    dist.broadcast(theirs, 0)
    return hashes, wrapper.explain(), torch.equal(weights, theirs)


def profiled_less(rank: int) -> list[int]:
    """Return the iterations after which wrappers have a plan: of all 8 that were asked for, and of iterations on a GPU
    that take long, or do not."""
    found = []
    for may, long_seconds in ((False, 0.0), (True, 0.0), (True, 600.0)):
        wrapper_planning.LONG_PROFILE_SECONDS = long_seconds
        wrapper = OurDDP(plain(), **quick() | {"profile_iterations": 8})
        wrapper._planning._may_profile_less = may
        for step in range(10):
            _loss(wrapper, rank, step, {}).backward()
            if wrapper.plan is not None:
                found.append(step)
                break
    return found


def timelines(rank: int) -> tuple[Any, Any, list[str]]:
    """Return the measured timelines of a wrapper that uses the engine and of one that uses a ring."""
    found, planned = [], []
    for strategy in ("native", "ring"):
        wrapper = OurDDP(plain(), strategy=strategy, planner="wfbp", bulk=False, **quick())
        assert wrapper.measured_timeline() is None
        for step in range(7):
            _loss(wrapper, rank, step, {}).backward()
        found.append(wrapper.measured_timeline())
        assert "measured compute " in wrapper.explain(picture=True)
        assert "predicted network " in wrapper.explain(picture=True)
        planned = [bucket.name for bucket in wrapper.plan.buckets]
    return found[0], found[1], planned


class FakeGauge:
    """A gauge whose network is made up, and that counts what it is asked for."""

    device, engine = "cpu", "gloo"

    def __init__(self, lines: dict[str, LinearCost], still_holds: bool = True, unfit: tuple[str, ...] = ()) -> None:
        self.lines, self.still_holds, self.unfit = lines, still_holds, unfit
        self.calls: list[str] = []

    @property
    def ranks(self) -> GroupRanks:
        return GroupRanks(dist.group.WORLD)

    def links(self, seconds: float) -> Network:
        self.calls.append("links")
        return Network(2, 1e-4, 1e-8, 1e-10)

    def holds(self, network: Network) -> bool:
        self.calls.append("check")
        return self.still_holds

    def with_line(self, network: Network, route: Route, seconds: float) -> Network:
        self.calls.append(str(route))
        if str(route) in self.unfit:
            raise FitError(f"no line describes {route}")
        line = self.lines.get(str(route), LinearCost(9.0, 0.0))
        return replace(network, all_reduce={**network.all_reduce, str(route): line})

    def close(self) -> None:
        self.calls.append("close")


def survey(rank: int, folder: str | None, surveys: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Make surveys one after the other; return of each the network, its routes, the calls, the warnings and the words.

    `clock` are the seconds that pass with each look at it.
    """
    found = []
    for asked in surveys:
        case = {"lines": {"native": LinearCost(1e-3, 1e-8)}, "routes": ("native",), "codec": None, "clock": 0.0} | asked
        if "file" in case:
            for path in Path(folder).iterdir() if rank == 0 else ():
                path.write_text(case["file"])
            dist.barrier()
        gauge = FakeGauge(case["lines"], case.get("holds", True), case.get("unfit", ()))
        spoken, ticks = Spoken(), itertools.count()
        surveying.perf_counter = lambda ticks=ticks, case=case: case["clock"] * next(ticks)
        routes = tuple(map(parse_route, case["routes"]))
        choice = Choice(TRACE, "exact", routes, auto=case["codec"] == "auto")
        one = Survey(gauge, None if folder is None else Path(folder), lambda _: None, spoken)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            network, known = one.find(Question(routes, case.get("given"), 10.0, lambda _, choice=choice: choice))
        said = [str(each.message) for each in warned]
        found.append((network, [str(route) for route in known], gauge.calls, said, spoken.said))
    return found


def speak(rank: int, model: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Train with a made-up network; return what this rank logged: levels and messages."""
    said: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("penstock")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    lines = {"native": LinearCost(0.1, 1e-8), "all_gather+onebit": LinearCost(1e-3, 1e-10)}
    device_measure.GroupGauge = lambda *_: FakeGauge(lines)  # type: ignore[assignment,misc]
    wrapper = OurDDP(MODELS[model](), profile_iterations=2, **options)
    for step in range(4):
        _loss(wrapper, rank, step, {}).backward()
    return said


TRACE = Trace("toy", "cpu", 1, "float32", 1e-3, tuple(Tensor(name, 1 << 20, 1e-3) for name in "dcba"))


class Spoken(Voice):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__(dist.get_rank() == 0)
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def measure_on_device(rank: int) -> Network:
    """Measure as with NCCL, on the device that is there; again where a busy machine spoils it, on all ranks alike."""
    for _ in range(5):
        with suppress(FitError):
            group, device = dist.group.WORLD, torch.device("cpu")
            network = measure_device_links(group, device, seconds=1.0)
            assert device_link_holds(group, device, network) in (True, False)  # whatever else runs; no rank waits
            return replace(network, all_reduce={"native": measure_all_reduce(group, device, 0.5)})
    raise AssertionError("five measurements in a row could not be fitted")
