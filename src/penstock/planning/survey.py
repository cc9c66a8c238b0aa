"""Finds out what a plan is made from: a network that was given, or kept, or is measured, route by route, for so long.

Rank 0 says after each measurement what to measure next (`choose.py`), or that it is enough: the best plan needs no
more, or the time that a user allows is spent. All ranks follow it, so all of them stop at the same place.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

from penstock.errors import FitError
from penstock.exchange.compression import AUTO, Compression
from penstock.log import Voice
from penstock.network import Network
from penstock.plan import Route
from penstock.planning.agree import TransportRanks, from_rank_0, nodes_of
from penstock.planning.candidates import candidates, codecs_of
from penstock.planning.choose import WORTH, Choice, choose, is_necessary, known_routes, next_route
from penstock.planning.measure import Gauge, HostGauge
from penstock.planning.measurement_cache import cluster_of, keep, load_kept, measurement_path
from penstock.planning.planning import Decision, Planning
from penstock.program.composition import LANES
from penstock.runtime.hosts import share_hosts
from penstock.runtime.transport import Transport
from penstock.trace import Trace

Ready = Callable[[Route], None]
LINKS_SHARE, LINE_SHARE = 0.08, 0.12  # of the seconds that measuring may take: for the links, and for each route
WORTH_AGAIN = 0.15  # of an iteration: what a route must promise that was not measured when the others were
LINKS_SECONDS, LINE_SECONDS = 2.0, 3.0  # more than this would tell nothing


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned, as far as it says what to measure."""

    routes: tuple[Route, ...]  # that a plan may use
    given: Network | None  # by the user
    seconds: float  # that measuring may take
    choice: Callable[[Network], Choice]  # asked on rank 0 only: what the plan is to be chosen from


@dataclass(slots=True)
class Survey:
    """Measures what a question needs; all ranks make the same calls."""

    gauge: Gauge
    folder: Path | None  # that keeps measurements; None: nothing does
    get_ready: Ready  # returns once the kernels of a route are compiled on this host
    voice: Voice
    _failed: set[Route] = field(default_factory=set)  # that no line describes

    def find(self, question: Question) -> tuple[Network, tuple[Route, ...]]:
        """Return the network and the routes of it that a plan may use.

        Raise `FitError` on all ranks where not even the links, or a route that every plan needs, can be measured.
        """
        start, path = perf_counter(), self._path(question)
        known = question.given or self._kept(path)
        network = known or self._links(question)
        worth = WORTH if known is None else WORTH_AGAIN
        while (found := self._next(question, network, start, worth)) is not None:
            network = self._with_line(question, network, *found)
        self.gauge.close()
        if path is not None and network is not known and self._is_first:
            keep(network, path)
        if self._sends_nothing:
            return network, question.routes
        return network, known_routes(network, question.routes, question.given is not None)

    @property
    def _is_first(self) -> bool:
        return self.gauge.ranks.rank == 0

    @property
    def _sends_nothing(self) -> bool:
        return self._workers == 1

    @property
    def _workers(self) -> int:
        return self.gauge.ranks.world_size

    def _path(self, question: Question) -> Path | None:
        """Return where this cluster's measurement is kept; None where nothing is."""
        if self.folder is None or question.given is not None or self._sends_nothing:
            return None
        gauge, codecs = self.gauge, codecs_of(question.routes)
        return measurement_path(self.folder, cluster_of(gauge.ranks, gauge.device, gauge.engine, codecs))

    def _kept(self, path: Path | None) -> Network | None:
        """Return what was kept, if it still holds."""
        if path is None:
            return None
        (network,) = from_rank_0(lambda: (load_kept(path, self._workers),), self.gauge.ranks)
        if network is None:
            return None
        with self.voice.step(f"checking the network measured before ({path})"):
            holds = self.gauge.holds(network)
        if not holds:
            self.voice.say("messages no longer take what they took then: measuring again")
        return network if holds else None

    def _links(self, question: Question) -> Network:
        seconds = min(LINKS_SHARE * question.seconds, LINKS_SECONDS)
        with self.voice.step(f"measuring the links between {self._workers} workers, about {seconds:.1f} s"):
            return self.gauge.links(seconds)

    def _next(self, question: Question, network: Network, start: float, worth: float) -> tuple[Route, bool] | None:
        """Return what rank 0 wants measured next, and whether no plan can do without it."""
        if self._sends_nothing:
            return None

        def look() -> tuple[tuple[Route, bool] | None]:
            choice = question.choice(network)
            left = tuple(route for route in choice.routes if route not in self._failed)
            route = next_route(replace(choice, routes=left), network, worth)
            if route is None or route in self._failed:
                return (None,)
            needed = is_necessary(choice, network, route)
            if perf_counter() - start > question.seconds and not needed:
                self.voice.say(f"{route} might be faster, but measure_seconds={question.seconds:g} are over")
                return (None,)
            return ((route, needed),)

        return from_rank_0(look, self.gauge.ranks)[0]

    def _with_line(self, question: Question, network: Network, route: Route, needed: bool) -> Network:
        """Return the network with the line of a route; without it where it has none, unless every plan needs it."""
        self.get_ready(route)
        seconds = min(LINE_SHARE * question.seconds, LINE_SECONDS)
        try:
            with self.voice.step(f"measuring {route}, about {seconds:.1f} s"):
                return self.gauge.with_line(network, route, seconds)
        except FitError as error:  # the same on all ranks, which agree on every time
            if needed:
                raise
            self.voice.say(f"{route} is left out: {error}")
            self._failed.add(route)
            return network


def plan_over(
    transport: Transport,
    engine: str,  # what `transport` is of, by name: mpi, memory
    trace: Trace,  # of this model; that of rank 0 counts
    compression: Compression | None = None,
    planning: Planning | None = None,
    get_ready: Ready = lambda _: None,  # returns once the kernels of a route are compiled
    halves: bool = False,  # finished sums are to travel during the next forward pass
) -> Decision:
    """Measure on all ranks of an engine, plan on rank 0, and return the same plan on all; host memory is measured.

    What torch's wrapper does between two iterations, for gradients of any framework; `Exchange.follow` takes the plan.
    """
    ranks, scheme = TransportRanks(transport), (compression or Compression()).scheme()
    settings = (planning or Planning()).settings(engine, races=False)
    scheme.check_strategy(settings.strategy)
    scheme.check_planner(settings.planner)
    if settings.plan is not None:
        return Decision(settings.plan)
    nodes = nodes_of(ranks)
    asked = settings.strategy, scheme, settings.planner, engine, share_hosts(nodes), ranks.world_size
    routes = candidates(*asked, halves)

    def choice(_: Network) -> Choice:
        auto, trusted = scheme.codec == AUTO, settings.network is not None
        return Choice(settings.trace or trace, settings.planner, routes, auto, trusted, lanes=LANES, bulk=settings.bulk)

    gauge = HostGauge(ranks, engine, lambda: transport)
    survey = Survey(gauge, settings.measurements, get_ready, Voice(ranks.rank == 0))
    network, known = survey.find(Question(routes, settings.network, settings.measure_seconds, choice))
    return from_rank_0(lambda: choose(choice(network), network, known, nodes), ranks)
