"""What a training script imports: DistributedDataParallel with planned messages, and the profiler behind it.

Names are imported when they are first used: profiling alone needs neither numba nor a process group.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.errors import naming_extra

if TYPE_CHECKING:
    from penstock.exchange.compression import Compression
    from penstock.planning.planning import Planning
    from penstock.torch.checkpoint_folder import Checkpoints
    from penstock.torch.ddp import DistributedDataParallel
    from penstock.torch.fsdp import fully_shard_with
    from penstock.torch.hook import comm_hook
    from penstock.torch.overlap import BulkSynchronous
    from penstock.torch.profile import Profiler, profile_backward
    from penstock.torch.servers import ParameterServers

__all__ = [
    "BulkSynchronous",
    "Checkpoints",
    "Compression",
    "DistributedDataParallel",
    "ParameterServers",
    "Planning",
    "Profiler",
    "comm_hook",
    "fully_shard_with",
    "profile_backward",
]
_HOME = {
    "BulkSynchronous": "torch.overlap",
    "Checkpoints": "torch.checkpoint_folder",
    "Compression": "exchange.compression",
    "DistributedDataParallel": "torch.ddp",
    "ParameterServers": "torch.servers",
    "Planning": "planning.planning",
    "Profiler": "torch.profile",
    "comm_hook": "torch.hook",
    "fully_shard_with": "torch.fsdp",
    "profile_backward": "torch.profile",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_extra():
        return getattr(import_module(f"penstock.{_HOME[name]}"), name)
