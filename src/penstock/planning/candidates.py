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
from penstock.strategies import parse_strategy


def candidates(
    strategy: str,
    compression: Scheme,
    planner: str,
    engine: str = "gloo",
    shares_hosts: bool = False,
    world_size: int | None = None,  # None: not known
) -> tuple[Route, ...]:
    """Return the routes that a plan may use, in as many pieces as strategies cut tensors by themselves.

    Of each codec the first is measured first. A planner that mixes, and codec="auto", have dense ones to choose from
    too. Where ranks share hosts, compressing between hosts only is one of them. One worker sends nothing, and has
    nothing to compress.
    """
    dense = (Route(NATIVE),) if world_size == 1 else tuple(map(Route, _dense(strategy, engine)))
    if compression.codec is None or world_size == 1:
        return dense
    if compression.codec == AUTO:
        packed = (_packed(strategy, each, engine, shares_hosts, world_size) for each in compression.candidates)
        return (*dense, *(route for routes in packed for route in routes))
    packed_by = _packed(strategy, compression, engine, shares_hosts, world_size)
    return (*(dense if planner in MIXING_PLANNERS else ()), *packed_by)


def _packed(
    strategy: str, compression: Scheme, engine: str, shares_hosts: bool, world_size: int | None
) -> tuple[Route, ...]:
    """Return the routes of a codec."""
    if strategy != AUTO:
        return (Route(strategy, compression.codec),)
    local = compression.local_strategy(engine) if shares_hosts else None
    names = (*compression.strategies_by(engine, world_size), *([local] if local else []))
    return tuple(Route(name, compression.codec) for name in names)


def _dense(strategy: str, engine: str) -> tuple[str, ...]:
    """Return what may carry dense buckets: the strategy that was named, where it can; else the planner chooses.

    Those of ours use host memory, so NCCL's own beats them.
    """
    name, options = parse_strategy(strategy)
    if strategy != AUTO and not {name, options.get("outer")} & {*COMPRESSED_ONLY, *SPARSE_STRATEGIES}:
        return (strategy,)
    return DENSE if engine in ("gloo", "mpi") else (NATIVE,)


def codecs_of(routes: Sequence[Route]) -> list[str]:
    """Return the codecs of some routes, in order."""
    return list(dict.fromkeys(route.codec for route in routes if route.codec))


def first_of_each_codec(routes: Sequence[Route]) -> tuple[Route, ...]:
    """Return the route by which each codec is measured first, the codec that sends least first."""
    return tuple({route.codec: route for route in reversed(routes) if route.codec}.values())
