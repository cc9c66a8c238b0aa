"""Averages gradients by parcels that are made once and used again, as an exchange does."""

from typing import Any
from weakref import WeakKeyDictionary

from penstock.exchange.averaging import Averaging, Parcel
from penstock.plan import Route

_MADE: WeakKeyDictionary[Averaging, dict[Any, Parcel]] = WeakKeyDictionary()


def average(
    averaging: Averaging,
    values: Any,
    route: Route,
    names: tuple[str, ...] = ("weight",),
    sizes: tuple[int, ...] | None = None,
    is_first: bool = True,
) -> Any:
    """Average `values`, a flat tensor or array, in place; return it."""
    kind = str(values.dtype).removeprefix("torch.")
    key = names, sizes or (len(values),), route, kind
    made = _MADE.setdefault(averaging, {})
    if key not in made:
        made[key] = averaging.parcel(*key[:3], 0, kind)
    if is_first:
        averaging.begin()
    averaging.average(made[key], values)
    return values
