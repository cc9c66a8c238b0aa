"""Refuses routes that nobody can take, before a host is started or anything is measured."""

from collections.abc import Iterable

from penstock.errors import PlanError

COMPRESSED_ONLY = "all_gather"  # of payloads: carries nothing dense


def check_routes(routes: Iterable[str]) -> None:
    """Raise unless every route, such as `ring+onebit/4`, names an all-reduce and, where it has one, a codec."""
    from penstock.plan import parse_route
    from penstock.strategies import SPARSE, names
    from penstock.strategies.options import parse_strategy

    for text in routes:
        route = parse_route(text)
        known = (*names("all_reduce"), *((COMPRESSED_ONLY, *(name for _, name in SPARSE)) if route.codec else ()))
        name, _ = parse_strategy(route.strategy)
        if name not in known:
            raise PlanError(f"no all-reduce strategy called {name!r}; wanted one of {', '.join(known)}")
        if route.codec:
            from penstock.codecs.registry import make_codec

            make_codec(route.codec)
