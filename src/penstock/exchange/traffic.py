"""Counts what a rank puts on the wire."""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.plan import Route
from penstock.run_record import RouteUse


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank has sent, beside what the same gradients take dense."""

    sent_nbytes: int  # put on the wire; of the engine's own collectives, what a ring sends
    dense_nbytes: int  # what a dense ring all-reduce of the same gradients sends

    def __add__(self, other: "Traffic") -> "Traffic":
        """Return the sums of both."""
        return Traffic(self.sent_nbytes + other.sent_nbytes, self.dense_nbytes + other.dense_nbytes)


@dataclass(frozen=True, slots=True)
class Used:
    """How one bucket, or a stretch of one, really travelled in an iteration."""

    name: str
    route: Route
    nbytes: int  # of its gradients
    sent_nbytes: int  # put on the wire by this rank


@dataclass(frozen=True, slots=True)
class Sent:
    """When one bucket was on the communication thread; seconds on `time.perf_counter`'s clock."""

    name: str
    start_seconds: float
    end_seconds: float
    is_queued: bool = False  # on a device: the host queued it then, and knows nothing of when it was averaged


def by_route(used: Iterable[Used]) -> tuple[RouteUse, ...]:
    """Return what each route carried, all its messages together."""
    found: dict[Route, list[Used]] = {}
    for each in used:
        found.setdefault(each.route, []).append(each)
    return tuple(
        RouteUse(str(route), len(parts), sum(each.nbytes for each in parts), sum(each.sent_nbytes for each in parts))
        for route, parts in found.items()
    )
