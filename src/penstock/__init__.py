"""penstock makes synchronous data-parallel training in PyTorch communication-efficient.

This package imports neither torch nor anything heavy; `penstock.torch` is what a training script imports. The names
below are looked up when they are first used, so that importing a part of the package does not import all its values.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.network import LinearCost, Network, load_network
    from penstock.plan import Bucket, Plan, load_plan
    from penstock.timeline import Span, Timeline
    from penstock.trace import Tensor, Trace, load_trace

__all__ = [
    "Bucket",
    "LinearCost",
    "Network",
    "PenstockError",
    "Plan",
    "Span",
    "Tensor",
    "Timeline",
    "Trace",
    "load_network",
    "load_plan",
    "load_trace",
]
__version__ = "0.1.0"
_HOMES = {
    "penstock.errors": ("PenstockError",),
    "penstock.network": ("LinearCost", "Network", "load_network"),
    "penstock.plan": ("Bucket", "Plan", "load_plan"),
    "penstock.timeline": ("Span", "Timeline"),
    "penstock.trace": ("Tensor", "Trace", "load_trace"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
