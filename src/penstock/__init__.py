"""penstock makes synchronous data-parallel training in PyTorch communication-efficient.

This package imports neither torch nor anything heavy; `penstock.torch` is what a training script imports.
"""

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
