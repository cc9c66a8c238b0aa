"""The routes that a plan may use, before anything is measured (`choose.py` chooses among them)."""

from collections.abc import Sequence

from penstock.exchange.compression import (
    AUTO,
    COMPRESSED_ONLY,
    DENSE,
    MIXING_PLANNERS,
    NATIVE,
    SPARSE_STRATEGIES,
    Scheme,
)
from penstock.plan import Route
from penstock.planning.planning import Settings
from penstock.program import Collective
from penstock.program.composition import in_halves
from penstock.strategies import build_coded_part, build_part, parse_strategy

_RANKS = 4  # of the programs that are looked at


def candidates(
    strategy: str,
    compression: Scheme,
    planner: str,
    engine: str = "gloo",
    shares_hosts: bool = False,
    world_size: int | None = None,  # None: not known
    halves: bool = False,  # finished sums are to travel by themselves, later
) -> tuple[Route, ...]:
    """Return the routes that a plan may use, in as many pieces as strategies cut tensors by themselves.

    Of each codec the first is measured first. A planner that mixes, and codec="auto", have dense ones to choose from
    too. Where ranks share hosts, compressing between hosts only is one of them. One worker sends nothing, and has
    nothing to compress.
    """
    dense = (Route(NATIVE),) if world_size == 1 else tuple(map(Route, _dense(strategy, engine, halves)))
    if compression.codec is None or world_size == 1:
        return dense
    if compression.codec == AUTO:
        packed = (_packed(strategy, each, engine, shares_hosts, world_size, halves) for each in compression.candidates)
        return (*dense, *(route for routes in packed for route in routes))
    packed_by = _packed(strategy, compression, engine, shares_hosts, world_size, halves)
    return (*(dense if planner in MIXING_PLANNERS else ()), *packed_by)


def _packed(
    strategy: str, compression: Scheme, engine: str, shares_hosts: bool, world_size: int | None, halves: bool
) -> tuple[Route, ...]:
    """Return the routes of a codec."""
    if strategy != AUTO:
        return (Route(strategy, compression.codec),)
    local = compression.local_strategy(engine) if shares_hosts else None
    flat = compression.strategies_by(engine, world_size)
    if halves:  # a codec may have none of them
        flat = tuple(name for name in flat if _has_second_half(name, compression.codec is not None)) or flat
    names = (*flat, *([local] if local else []))
    return tuple(Route(name, compression.codec) for name in names)


def _dense(strategy: str, engine: str, halves: bool) -> tuple[str, ...]:
    """Return what may carry dense buckets: the strategy that was named, where it can; else the planner chooses.

    Those of ours use host memory, so NCCL's own beats them.
    """
    name, options = parse_strategy(strategy)
    if strategy != AUTO and not {name, options.get("outer")} & {*COMPRESSED_ONLY, *SPARSE_STRATEGIES}:
        return (strategy,)
    if halves:
        return tuple(name for name in DENSE if _has_second_half(name, coded=False))
    return DENSE if engine in ("gloo", "mpi") else (NATIVE,)


def _has_second_half(strategy: str, coded: bool) -> bool:
    """Say whether finished sums travel by themselves: else nothing is left for the forward pass."""
    if coded:
        whole, _ = build_coded_part(strategy, 0, _RANKS, (0, _RANKS))
    else:
        whole = build_part(Collective.ALL_REDUCE, strategy, 0, _RANKS, _RANKS)
    part, first = in_halves(whole)
    return first < len(part.instructions)


def codecs_of(routes: Sequence[Route]) -> list[str]:
    """Return the codecs of some routes, in order."""
    return list(dict.fromkeys(route.codec for route in routes if route.codec))


def first_of_each_codec(routes: Sequence[Route]) -> tuple[Route, ...]:
    """Return the route by which each codec is measured first, the codec that sends least first."""
    return tuple({route.codec: route for route in reversed(routes) if route.codec}.values())


def routes_to_compile(settings: Settings, compression: Scheme, world_size: int | None = None) -> tuple[Route, ...]:
    """Return a route of each codec that training may need: of the plan that was given, or of all that one may use."""
    if settings.plan is not None:
        return first_of_each_codec([bucket.route for bucket in settings.plan.buckets])
    return first_of_each_codec(candidates(settings.strategy, compression, settings.planner, world_size=world_size))
