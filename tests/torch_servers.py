"""What each process of a test with parameter servers does: train or serve, and report."""

import os
from contextlib import nullcontext
from functools import partial
from itertools import count, pairwise
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import PlanError, TransportError
from penstock.exchange.averaging import Averaging
from penstock.exchange.compression import Scheme
from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.runtime import communicator, failure_diagnosis
from penstock.runtime.views import flat
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch import ParameterServers
from penstock.torch.arrays import TorchArrays
from penstock.torch.checkpoint import TorchMemory
from penstock.torch.servers import ServedExchange, Server

sgd = partial(torch.optim.SGD, lr=0.125, momentum=0.5)


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = list[nn.Module]()
    for inputs, outputs in pairwise((8, 48, 64, 20, 4)):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def network(world_size: int, *routes: str) -> Network:
    """Return a network with lines of these routes, so that nothing is measured."""
    return Network(world_size, 1e-4, 1e-9, 1e-10, dict.fromkeys(routes, LinearCost(1e-4, 1e-9)))


def loss(wrapper: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * rank + step))
    return (wrapper(inputs) - inputs[:, :4]).square().mean()


def train(rank: int, wrapper: Any, steps: range) -> None:
    optimizer = sgd(wrapper.parameters())
    for step in steps:
        optimizer.zero_grad()
        loss(wrapper, rank, step).backward()
        optimizer.step()


def weights(wrapper: Any) -> list[Any]:
    return [each.detach().clone().numpy() for each in wrapper.module.parameters()]


def served(rank: int, count: int, options: dict[str, Any], measures: bool = False) -> Any:
    """Train with the last `count` ranks as servers; return weights, what was used, and what this rank owes."""
    servers = ParameterServers(count)
    if servers.is_server:
        servers.serve()
        return "served"
    route = servers.strategy + (f"+{options['codec']}" if "codec" in options else "")
    known = {} if measures else {"network": network(dist.get_world_size(), route)}
    wrapper = OurDDP(model(), servers=servers, profile_iterations=2, measure_seconds=0.5, **known, **options)
    train(rank, wrapper, range(6))
    owed = wrapper.exchange_state_dict()["memories"].get("residual", {})
    used = sorted(str(each.route) for each in wrapper.routes_used())
    servers.close()
    return {"weights": weights(wrapper), "used": used, "owed": {name: each.numpy() for name, each in owed.items()}}


def alone(rank: int, options: dict[str, Any]) -> Any:
    """Train without servers."""
    strategy = {"strategy": "ring"} if "codec" not in options else {"strategy": "parameter_server"}
    route = strategy["strategy"] + (f"+{options['codec']}" if "codec" in options else "")
    wrapper = OurDDP(
        model(), profile_iterations=2, network=network(dist.get_world_size(), route), **strategy, **options
    )
    train(rank, wrapper, range(6))
    return {"weights": weights(wrapper)}


class Weights(nn.Module):
    """Parameters whose gradients are the inputs, to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.zeros(40, 50)), nn.Parameter(torch.zeros(7))

    def forward(self, large: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
        return (self.large * large).sum() + (self.small * small).sum()


def conserved(rank: int, count: int, options: dict[str, Any], device: str = "cpu", backend: str | None = None) -> Any:
    """Apply gradients that are known; return sums of what was applied and computed, what is owed, and a resumed run."""
    servers = ParameterServers(count, backend)
    if servers.is_server:
        servers.serve()
        return "served"
    route = servers.strategy + (f"+{options['codec']}" if "codec" in options else "")
    known = network(dist.get_world_size(), route)
    wrapper = OurDDP(Weights().to(device), servers=servers, profile_iterations=2, network=known, **options)
    module, workers = wrapper.module, dist.get_world_size(servers.workers)

    def inputs(of: int, step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * of + step)
        return [torch.randint(-64, 65, shape, generator=generator) / 64 for shape in ((40, 50), (7,))]

    applied = {name: torch.zeros_like(each) for name, each in module.named_parameters()}

    def train(steps: range) -> bytes:
        for step in steps:
            wrapper.zero_grad()
            wrapper(*(each.to(device) for each in inputs(rank, step))).backward()
            for name, each in module.named_parameters():
                applied[name] += each.grad
        return b"".join(each.cpu().numpy().tobytes() for each in applied.values())

    train(range(5))
    state = wrapper.exchange_state_dict()
    owed = {name: each.clone().numpy() for name, each in state["memories"].get("residual", {}).items()}
    computed = [sum(inputs(of, step)[at] for of in range(workers) for step in range(5)) / workers for at in (0, 1)]
    sums = {
        name: (applied[name].cpu().numpy().copy(), each.numpy())
        for name, each in zip(("large", "small"), computed, strict=True)
    }
    everyone: list[Any] = [None] * workers
    dist.all_gather_object(everyone, state, group=servers.workers)
    before = {name: each.clone() for name, each in applied.items()}
    unbroken = train(range(5, 8))
    wrapper.load_exchange_state_dict(everyone)
    applied.update(before)
    resumed = train(range(5, 8))
    servers.close()
    return {"sums": sums, "owed": owed, "unbroken": unbroken, "resumed": resumed}


def left_alone(rank: int) -> str:
    """End those that train without a word; return what the server says."""
    servers = ParameterServers(1)
    if not servers.is_server:
        return ""
    try:
        servers.serve()
    except TransportError as error:
        return str(error)
    return "served"


def refused(rank: int, options: dict[str, Any]) -> str:
    """Return what is said of options that cannot work."""
    try:
        servers = ParameterServers(options.pop("count", 1))
        if servers.is_server:
            return ""
        if "grad_scaler" in options:
            options["grad_scaler"] = torch.amp.GradScaler("cpu")
        OurDDP(model(), **{"servers": servers} | options)
    except PlanError as error:
        return str(error)
    return "taken"


def in_one_lane(rank: int, codec: str | None = None) -> Any:
    """Average three buckets as those of a device are; return sums of what was applied and computed, and what is owed.

    With a codec they are on one, so this rank is told: host memory, where kernels run in Triton's interpreter.
    """
    servers = ParameterServers(1)
    if servers.is_server:
        servers.serve()
        return "served"
    if codec is not None:
        _take_tensors_for_a_devices()
    memory = TorchMemory(Scheme(codec))
    exchange = ServedExchange(servers, Route(servers.strategy, codec), memory)
    buckets = [exchange.bucket([name], [1000]) for name in ("a", "b", "c")]
    applied = torch.zeros(3, 1000)
    for step in range(2):
        values = gradients(rank, step)
        exchange.begin()
        each = zip(buckets, values, strict=True)
        handles = [exchange.start(bucket, value, around=lambda _: nullcontext()) for bucket, value in each]
        exchange.finish()
        for handle in handles:
            exchange.wait(handle)
        applied += values
    servers.collect_residuals(memory)
    owed = memory.state_dict(rank, 2)["memories"].get("residual", {})
    exchange.close()
    servers.close()
    return applied.numpy(), torch.stack([owed.get(name, torch.zeros(1000)) for name in "abc"]).numpy()


def gradients(rank: int, step: int) -> torch.Tensor:
    """Return those of three buckets, whose sums are exact."""
    return torch.randint(-64, 65, (3, 1000), generator=torch.Generator().manual_seed(10 * step + rank)) / 64


def _take_tensors_for_a_devices() -> None:
    communicator.is_on_cuda = lambda data: isinstance(data, torch.Tensor)
    communicator.flat = lambda data, on_device=False: flat(data)
    TorchArrays.device = lambda self, values: values.device if isinstance(values, torch.Tensor) else None


def broken(rank: int) -> str:
    """Fail on the server, on its communication thread; return what each rank says."""
    servers = ParameterServers(1)
    try:
        if servers.is_server:
            Averaging.average = _fails
            servers.serve()
        else:
            _train_with(servers, rank)
    except (OSError, TransportError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def _fails(*_arguments: Any) -> None:
    raise OSError("this server is out of memory")


def killed(rank: int, word: str) -> str:
    """End the server without a word when it is told something for the third time; return what each rank says."""
    servers = ParameterServers(1)
    if servers.is_server:
        called, do = count(1), getattr(Server, f"_{word}")
        setattr(Server, f"_{word}", lambda *arguments: os._exit(9) if next(called) == 3 else do(*arguments))
        servers.serve()
    try:
        _train_with(servers, rank)
    except TransportError as error:
        return str(error)
    return "went on"


def _train_with(servers: ParameterServers, rank: int) -> None:
    known = network(dist.get_world_size(), servers.strategy)
    train(rank, OurDDP(model(), servers=servers, profile_iterations=2, network=known), range(9))


LOST_STEP = 4


def lost(rank: int, victim: int, what: int) -> tuple[str, float]:
    """Send `victim` a signal before a step; return what each other says, and after how long.

    Half of the timeout is for notes: on a busy machine ranks notice at different moments.
    """
    failure_diagnosis.SHARE, failure_diagnosis.LONGEST_SECONDS = 0.5, 5.0
    servers, began = ParameterServers(1), monotonic()
    try:
        if servers.is_server:
            if rank == victim:
                _signal_at(Server, "_begin", what)
            servers.serve()
            return "served", 0.0
        known = network(dist.get_world_size(), servers.strategy)
        wrapper = OurDDP(model(), servers=servers, profile_iterations=2, network=known)
        for step in range(100):
            if step == LOST_STEP and rank == victim:
                os.kill(os.getpid(), what)
            began = monotonic()
            loss(wrapper, rank, step).backward()
    except TransportError as error:
        return str(error), monotonic() - began
    return "went on", 0.0


def _signal_at(of: type, method: str, what: int) -> None:
    called, do = count(1), getattr(of, method)

    def counted(*arguments: Any) -> None:
        if next(called) == LOST_STEP:
            os.kill(os.getpid(), what)
        do(*arguments)

    setattr(of, method, counted)


def sleepy(rank: int, seconds: float) -> str:
    """Sleep between two steps for so long; return what this rank did."""
    servers = ParameterServers(1)
    if servers.is_server:
        servers.serve()
        return "served"
    known = network(dist.get_world_size(), servers.strategy)
    wrapper = OurDDP(model(), servers=servers, profile_iterations=2, network=known)
    train(rank, wrapper, range(4))
    sleep(seconds)
    train(rank, wrapper, range(4, 6))
    servers.close()
    return "trained"
