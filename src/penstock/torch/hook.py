"""A communication hook for torch's own wrapper: a sender of buckets that needs no plan."""

import torch
import torch.distributed as dist

from penstock.codecs.codec import Codec
from penstock.errors import PlanError
from penstock.exchange.compression import AUTO, Warmup, make_compression
from penstock.exchange.momentum import Momentum
from penstock.exchange.parameter_state import Memory, Scaler
from penstock.log import Voice
from penstock.plan import Route
from penstock.planning.decide import check_strategy
from penstock.runtime.rehearse import Compiling
from penstock.torch.check_inputs import compare_ranks
from penstock.torch.checkpoint import Loads
from penstock.torch.engines import check_engine
from penstock.torch.sender import TIMEOUT_SECONDS, BucketSender, Hook


def comm_hook(
    strategy: str = AUTO,
    codec: str | Codec | None = None,
    *,
    density: float | None = None,
    warmup: Warmup = None,
    warmup_every: int = 1,
    dense_below: int = 0,
    momentum: float = 0.0,
    nesterov: bool = False,
    momentum_masking: bool = True,
    clip: float | None = None,
    clip_by: str = "model",
    select: str = "tensor",
    module: torch.nn.Module | None = None,
    on_nonfinite: str = "raise",
    grad_scaler: Scaler | None = None,
    find_unused_parameters: bool = False,
    process_group: dist.ProcessGroup | None = None,
    engine: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> tuple["BucketSender", Hook]:
    """Return what torch's own wrapper takes: `ddp.register_comm_hook(*comm_hook("ring"))`.

    Every rank must call this at the same time, as it makes a process group. `codec` compresses every bucket, with
    error feedback; it and what follows mean what they do in `DistributedDataParallel`, `engine` too. The first of
    the two values has `exchange_state_dict`, `load_exchange_state_dict` and `bytes_sent`; with `module` the state names
    parameters as it does, otherwise by the order in which torch brings them. Say `find_unused_parameters` and
    `process_group` where the wrapper does. timeout_seconds: of one message.
    """
    if codec == AUTO:
        raise PlanError("codec 'auto' needs a plan to predict what pays; name a codec, or use DistributedDataParallel")
    kept = Momentum(momentum, nesterov, momentum_masking, clip, clip_by)
    compression = make_compression(codec, density, warmup, warmup_every, dense_below, kept, select)
    compression.check_planner("torch's")
    strategy = compression.strategies[0] if strategy == AUTO else strategy
    check_strategy(strategy)
    check_engine(engine)
    compression.check_strategy(strategy)
    group = process_group or dist.group.WORLD
    if group is None:
        raise PlanError("no process group; call torch.distributed.init_process_group first")
    names = {} if module is None else {id(parameter): name for name, parameter in module.named_parameters()}
    memory = Memory(compression, on_nonfinite, grad_scaler)
    asked = {"strategy": strategy, "engine": engine, "find_unused_parameters": find_unused_parameters}
    token = compare_ranks({name: repr(value) for name, value in asked.items()} | memory.options, module, group)
    memory.loads = Loads(group, token, by_exchange=True)
    memory.know({} if module is None else dict(module.named_parameters()))
    route = Route(strategy, compression.codec)
    sender = BucketSender(group, timeout_seconds, route, memory, names, find_unused_parameters, engine)
    _get_ready(route, module, group)
    return sender, sender.hook


def _get_ready(route: Route, module: torch.nn.Module | None, group: dist.ProcessGroup) -> None:
    """Have the kernels of a codec on disk before its first bucket is sent; on a GPU there are others."""
    parameters = [] if module is None else list(module.parameters())
    on_cpu = all(each.device.type == "cpu" for each in parameters) if parameters else not torch.cuda.is_available()
    if route.codec is not None and on_cpu and not (compiling := Compiling(())).is_ready(route):
        with Voice(dist.get_rank(group) == 0).holding_up(f"compiling the kernels of {route.codec}"):
            compiling.ready(route)
