"""Refuses routes that cannot be taken, before a host is started or anything is measured."""

from collections.abc import Iterable

from penstock.errors import PlanError, did_you_mean


def check_routes(routes: Iterable[str]) -> None:
    """Raise unless every route, such as `ring+onebit/4`, names an all-reduce and, where it has one, a codec."""
    from penstock.plan import parse_route
    from penstock.strategies import coded_only_names, names, parse_strategy, sparse_names

    for text in routes:
        route = parse_route(text)
        known = (*names("all_reduce"), *((*coded_only_names(), *sparse_names()) if route.codec else ()))
        name, _ = parse_strategy(route.strategy)
        if name not in known:
            near = did_you_mean(name, known)
            raise PlanError(f"no all-reduce strategy called {name!r}; wanted one of {', '.join(known)}{near}")
        if route.codec:
            from penstock.codecs.registry import make_codec

            make_codec(route.codec)
