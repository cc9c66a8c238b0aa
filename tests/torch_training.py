"""What each process of a wrapper test does: train a small model with torch's DDP or ours, and report."""

import copy
import io
import itertools
import os
import pickle
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from penstock.curves import CodecCurves, Curve
from penstock.errors import FitError
from penstock.network import LinearCost, Network
from penstock.plan import Bucket, Plan, Route
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch import comm_hook, overlap
from penstock.torch import measure as measuring
from penstock.torch.bsp import BulkSynchronous
from penstock.torch.device_measure import measure_device_network

ONEBIT = ("ring+onebit", "parameter_server+onebit", "all_gather+onebit")
CODECS = ("onebit", "terngrad(bitwidth=2)", "tbq", "topk(density=0.25)")
ROUTES = (
    "native",
    *(f"{name}+{codec}" for name in ("ring", "parameter_server", "all_gather", "linear_pipeline") for codec in CODECS),
    *(f"{name}+sparse(density=0.1)" for name in ("gtopk", "gtopk_doubling", "topk_allgather")),
)
NETWORK = Network(2, 1e-4, 1e-9, 1e-10, dict.fromkeys(ROUTES, LinearCost(1e-4, 1e-9)))  # for tests that do not measure


QUICK = {"network": NETWORK, "profile_iterations": 2}


class Branches(nn.Module):
    """A model whose second branch is used only in odd calls."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.relu(self.stem(x))
        return self.left(hidden) + (self.right(hidden) if self.calls % 2 else 0.0)


class Tied(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(torch.tanh(self.mix(self.embed(x))), self.embed.weight.T)


class Mixed(nn.Module):
    """Parameters of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).double()).float()


def frozen() -> nn.Module:
    model = plain()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return model


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


MODELS = {
    "plain": plain,
    "branches": Branches,
    "tied": Tied,
    "mixed": Mixed,
    "frozen": frozen,
    "normalised": normalised,
}


def train(
    rank: int, model: str, ours: bool, options: dict[str, Any], iterations: int = 8, accumulate: int = 1, **how: Any
) -> dict[str, Any]:
    """Train for some iterations and return parameters, the plan and what `explain` says."""
    torch.manual_seed(1)
    module = MODELS[model]()
    wrapper = (OurDDP if ours else TorchDDP)(module, **options)
    running = torch.compile(wrapper, backend="eager") if how.get("compiled") else wrapper
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05, momentum=0.9)
    for step in range(iterations):
        for micro in range(accumulate):
            with wrapper.no_sync() if micro < accumulate - 1 else nullcontext():
                _loss(running, rank, step * accumulate + micro, how).backward()
        if how.get("clip"):
            nn.utils.clip_grad_norm_(wrapper.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
    found = {name: value.detach().clone().numpy() for name, value in wrapper.module.state_dict().items()}
    plan = getattr(wrapper, "plan", None)
    return {"state": found, "plan": plan, "explain": wrapper.explain() if ours else ""}


def compare(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Train each case with torch's wrapper and with ours; a case has `model`, `torch`, `ours` and ways to train."""
    found = {}
    for name, case in cases.items():
        model, theirs, ours = case.get("model", "plain"), case.get("torch", {}), case.get("ours", {})
        how = {key: value for key, value in case.items() if key not in ("model", "torch", "ours")}
        found[name] = train(rank, model, False, theirs, **how), train(rank, model, True, QUICK | theirs | ours, **how)
    return found


def _loss(model: nn.Module, rank: int, step: int, how: dict[str, Any]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, 8, generator=generator)
    context = torch.autocast("cpu", torch.bfloat16) if how.get("autocast") else nullcontext()
    with context:
        return model(x).float().square().sum()


def train_uneven(rank: int, ours: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Rank r has r more batches than rank 0; the join context covers for those who ran out."""
    torch.manual_seed(1)
    wrapper = (OurDDP if ours else TorchDDP)(plain(), **options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05)
    for step in range(4):
        _loss(wrapper, rank, step, {}).backward()
        optimizer.step()
        optimizer.zero_grad()
    with wrapper.join():
        for step in range(4, 7 + rank):
            _loss(wrapper, rank, step, {}).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"state": {name: value.numpy() for name, value in wrapper.module.state_dict().items()}}


def follow_buckets(rank: int, planner: str) -> list[list[int]]:
    """Return, for each iteration, the bytes of the buckets that a user's hook sees."""
    seen: list[list[int]] = [[]]
    wrapper = OurDDP(plain(), planner=planner, strategy="native", network=NETWORK, profile_iterations=2)
    wrapper.register_comm_hook(seen, _watch)
    for step in range(6):
        _loss(wrapper, rank, step, {}).backward()
        seen.append([])
    planned = [bucket.nbytes for bucket in wrapper.plan.buckets]
    return [*seen[:-1], planned]


def _watch(state: list[list[int]], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state[-1].append(bucket.buffer().nbytes)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def copy_and_pickle(rank: int) -> list[str]:
    """Return the plans' hashes of a wrapper, of its deep copy and of one that went through pickle."""
    wrapper = OurDDP(plain(), strategy="ring", network=NETWORK, profile_iterations=2)
    for step in range(4):
        _loss(wrapper, rank, step, {}).backward()
    twins = [copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))]
    for twin in twins:
        _loss(twin, rank, 9, {}).backward()
    file = io.BytesIO()
    torch.save(wrapper.state_dict(), file)
    return [each.plan.hash for each in (wrapper, *twins)]


def different_plans(rank: int) -> str:
    """Give each rank another plan."""
    wrapper = OurDDP(nn.Linear(2, 1), plan=Plan("m", 2, "hand", (Bucket(("bias", "weight"), 12 + rank, "native"),)))
    try:
        wrapper(torch.ones(1, 2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def lose_a_rank(rank: int) -> str:
    """Rank 1 dies in its sixth iteration; return what the other one is told, and what it is told afterwards."""
    wrapper = OurDDP(plain(), strategy="ring", network=NETWORK, profile_iterations=2)
    for step in range(8):
        if rank == 1 and step == 5:
            os._exit(7)
        try:
            _loss(wrapper, rank, step, {}).backward()
        except Exception as error:
            return f"{type(error).__name__}: {error} | {_next_error(wrapper, rank)}"
    return "no error"


def _next_error(wrapper: nn.Module, rank: int) -> str:
    try:
        _loss(wrapper, rank, 99, {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train_with_bare_hook(rank: int) -> dict[str, Any]:
    """Keep torch's wrapper and give it our hook."""
    torch.manual_seed(1)
    wrapper = TorchDDP(plain())
    wrapper.register_comm_hook(*comm_hook("recursive_doubling"))
    return _train_few(wrapper, rank)


def train_without_hook(rank: int) -> dict[str, Any]:
    """Train the same with torch alone."""
    torch.manual_seed(1)
    return _train_few(TorchDDP(plain()), rank)


def _train_few(wrapper: nn.Module, rank: int) -> dict[str, Any]:
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05)
    for step in range(4):
        _loss(wrapper, rank, step, {}).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"state": {name: value.numpy() for name, value in wrapper.module.state_dict().items()}}


def train_bulk_synchronous(rank: int, cases: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Train each (model, algorithm, strategy) of `penstock.torch.bsp`, and the model with torch's wrapper."""
    found = {}
    for model, algorithm, strategy in cases:
        overlap.Split.least_nbytes = 0 if model == "plain" else 1 << 20  # layer by layer, and all of them together
        torch.manual_seed(1 + rank)  # ranks start apart: rank 0's weights count
        module = MODELS[model]()
        bsp = BulkSynchronous(module, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), algorithm, strategy)
        for step in range(12):
            _loss(bsp, rank, step, {}).backward()
            bsp.step()
        bsp.close()
        found[model, algorithm, strategy] = {
            "state": {name: value.clone().numpy() for name, value in module.state_dict().items()}
        }
    return found


def train_plain(rank: int, models: list[str]) -> dict[str, dict[str, Any]]:
    """Train each model with torch's wrapper alone."""
    found = {}
    for model in models:
        torch.manual_seed(1)
        options = {"find_unused_parameters": True} if model == "branches" else {}
        wrapper = TorchDDP(MODELS[model](), **options)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05, momentum=0.9)
        for step in range(12):
            _loss(wrapper, rank, step, {}).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[model] = {"state": {name: value.clone().numpy() for name, value in wrapper.module.state_dict().items()}}
    return found


def train_without_a_measurable_network(rank: int) -> dict[str, Any]:
    """Let measuring fail, as it may on a machine that does too much else."""
    torch.manual_seed(1)
    wrapper = OurDDP(plain(), profile_iterations=2)

    def fail() -> Network:
        raise FitError("point-to-point times do not grow with size")

    wrapper._conductor._measure = fail
    return _train_few(wrapper, rank) | {"explain": wrapper.explain()}


class Echo(nn.Module):
    """Two weights whose gradients are the inputs: what was applied can be counted to the bit."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (37, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.cat([self.first, self.second]) * x).sum()


def echo_inputs(rank: int, step: int) -> torch.Tensor:
    """Dyadic values: sums of some hundred of them are exact in float32."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-512, 513, (57,), generator=generator) / 64


def echo(rank: int, cases: dict[str, dict[str, Any]], steps: int = 8) -> dict[str, dict[str, Any]]:
    """Apply the gradients of `Echo` by each case's wrapper; return what was applied and what is still owed."""
    return {name: _echo(rank, case, steps) for name, case in cases.items()}


def _echo(rank: int, options: dict[str, Any], steps: int) -> dict[str, Any]:
    chosen = dict(options)
    module = Echo(getattr(torch, chosen.pop("dtype", "float32")))
    wrapper = OurDDP(module, **QUICK | chosen)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
    for step in range(steps):
        wrapper(echo_inputs(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = wrapper.exchange_state_dict()
    owed = state["memories"]["residual"]
    traffic = wrapper.bytes_sent()
    return {
        "applied": -torch.cat([module.first, module.second]).detach().float().numpy(),
        "owed": torch.cat([owed.get(name, torch.zeros(0)) for name in ("first", "second")]).numpy(),
        "plan": wrapper.plan,
        "sent": (traffic.sent_nbytes, traffic.dense_nbytes),
        "explain": wrapper.explain(),
    }


def stop_and_go_on(rank: int, codec: str, folder: str) -> dict[str, Any]:
    """Train 6 + 4 iterations in two wrappers, the second from the first's checkpoint, and 10 in one."""
    whole, _ = _train_echo(rank, codec, range(10))
    first, module = _train_echo(rank, codec, range(6))
    torch.save(first.exchange_state_dict(), f"{folder}/{rank}.pt")
    dist.barrier()
    states = [torch.load(f"{folder}/{each}.pt") for each in range(dist.get_world_size())]
    second, module = _train_echo(rank, codec, range(6, 10), module, states)
    owed = second.exchange_state_dict()["memories"]["residual"]
    return {
        "whole": torch.cat([whole.module.first, whole.module.second]).detach().numpy(),
        "parts": torch.cat([module.first, module.second]).detach().numpy(),
        "owed": torch.cat([owed["first"], owed["second"]]).numpy(),
    }


def go_on_with_other_workers(rank: int, codec: str, folder: str, before: int) -> dict[str, Any]:
    """Load what `before` ranks left in a folder, train on, and return what was applied and is owed."""
    states = [torch.load(f"{folder}/{each}.pt") for each in range(before)]
    wrapper, module = _train_echo(rank, codec, range(4), Echo(), states)
    owed = wrapper.exchange_state_dict()["memories"]["residual"]
    return {
        "applied": -torch.cat([module.first, module.second]).detach().numpy(),
        "owed": torch.cat([owed["first"], owed["second"]]).numpy(),
    }


def _train_echo(
    rank: int, codec: str, steps: range, module: nn.Module | None = None, states: list[Any] | None = None
) -> tuple[Any, Any]:
    """Compress from the first step on: the plan is given, so nothing is profiled."""
    module = module or Echo()
    bucket = Bucket(("second", "first"), 228, "ring", codec)
    wrapper = OurDDP(module, codec=codec, plan=Plan("echo", dist.get_world_size(), "hand", (bucket,)))
    if states is not None:
        wrapper.load_exchange_state_dict(states)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
    for step in steps:
        wrapper(echo_inputs(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wrapper, module


def not_finite(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Let rank 1's gradient of `first` be infinite in the seventh step; skip steps that are not finite, as AMP does."""
    wrapper = OurDDP(Echo(), **QUICK | options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
    taken = []
    for step in range(9):
        inputs = echo_inputs(rank, step)
        if rank == 1 and step == 6:
            inputs[3] = torch.inf
        try:
            wrapper(inputs).backward()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            return {"error": told, "next": _next_echo_error(wrapper, rank), "bare": _bare_hook_error(rank)}
        if all(torch.isfinite(each.grad).all() for each in wrapper.parameters()):
            optimizer.step()
            taken.append(step)
        optimizer.zero_grad()
    owed = wrapper.exchange_state_dict()["memories"]["residual"]
    return {
        "taken": taken,
        "applied": -torch.cat([wrapper.module.first, wrapper.module.second]).detach().numpy(),
        "owed": torch.cat([owed["first"], owed["second"]]).numpy(),
    }


def _bare_hook_error(rank: int) -> str:
    module = Echo()
    wrapper = TorchDDP(module)
    wrapper.register_comm_hook(*comm_hook("ring", codec="onebit", module=module))
    inputs = echo_inputs(rank, 0)
    inputs[3] = torch.inf if rank == 1 else 0.0
    try:
        wrapper(inputs).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _next_echo_error(wrapper: nn.Module, rank: int) -> str:
    try:
        wrapper(echo_inputs(rank, 0))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def echo_by_bare_hook(rank: int, codec: str, steps: int = 5) -> dict[str, Any]:
    """Keep torch's wrapper, with our hook and a codec."""
    module = Echo()
    wrapper = TorchDDP(module)
    sender, hook = comm_hook("ring", codec, module=module)
    wrapper.register_comm_hook(sender, hook)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
    for step in range(steps):
        wrapper(echo_inputs(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    owed = sender.exchange_state_dict()["memories"]["residual"]
    return {
        "applied": -torch.cat([module.first, module.second]).detach().numpy(),
        "owed": torch.cat([owed["first"], owed["second"]]).numpy(),
        "sent": sender.bytes_sent().sent_nbytes,
    }


class Sometimes(nn.Module):
    """Three weights of which a rank uses the last in some steps only, and nobody does in others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Parameter(torch.zeros(size)) for size in (37, 20, 30))

    def forward(self, x: torch.Tensor, uses_last: bool) -> torch.Tensor:
        total = (torch.cat([self.first, self.second]) * x).sum()
        return total + (self.last * x[:30]).sum() if uses_last else total


def leave_out(rank: int, codec: str) -> dict[str, Any]:
    """Both ranks use the last weight in steps 0-2, rank 1 alone in step 3, nobody in steps 4-7."""
    module = Sometimes()
    bucket = Bucket(("last", "second", "first"), 348, "ring", codec)
    plan = Plan("sometimes", dist.get_world_size(), "hand", (bucket,))
    wrapper = OurDDP(module, codec=codec, plan=plan, find_unused_parameters=True)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
    for step in range(8):
        wrapper(echo_inputs(rank, step), step < 3 or (step == 3 and rank == 1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    owed = wrapper.exchange_state_dict()["memories"]["residual"]
    return {"applied": -module.last.detach().numpy(), "owed": owed["last"].numpy()}


def owed_in(path: str) -> Any:
    """Return what a saved state of `Echo` owes."""
    kept = torch.load(path)["memories"]["residual"]
    return torch.cat([kept["first"], kept["second"]]).numpy()


def register_hook_beside_codec(rank: int) -> None:
    """Ask for a codec and register a hook."""
    OurDDP(plain(), codec="onebit").register_comm_hook([[]], _watch)


def compare_traffic(rank: int) -> list[Any]:
    """Return what a model of some size sends dense and compressed, in as many iterations."""
    found = []
    for codec in (None, "onebit"):
        bucket = Bucket(("bias", "weight"), 4 * 257 * 256, "ring", codec)
        wrapper = OurDDP(nn.Linear(256, 256), codec=codec, plan=Plan("m", 2, "hand", (bucket,)))
        for _ in range(3):
            wrapper(torch.ones(2, 256)).sum().backward()
        found.append(wrapper.bytes_sent())
    return found


def losses(rank: int, options: dict[str, Any], iterations: int = 60) -> list[float]:
    """Train the plain model to give zero; return the loss of each iteration."""
    torch.manual_seed(1)
    wrapper = OurDDP(plain(), **QUICK | options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01)
    found = []
    for step in range(iterations):
        loss = _loss(wrapper, rank, step, {})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def train_momentum(rank: int, options: dict[str, Any] | None, steps: int) -> Any:
    """Train `Echo` with momentum 0.5 in our exchange, or in torch's optimizer where there are no options."""
    module = Echo()
    wrapper = TorchDDP(module) if options is None else OurDDP(module, codec="gtopk", momentum=0.5, **options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0, momentum=0.5 if options is None else 0.0)
    for step in range(steps):
        wrapper(echo_inputs(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([module.first, module.second]).detach().numpy()


def random_inputs(rank: int, number: int) -> torch.Tensor:
    """Values of which no two are alike, so that the largest are known whatever the rounding."""
    return torch.randn(57, generator=torch.Generator().manual_seed(1000 * number + rank))


def train_sparse(rank: int, cases: dict[str, dict[str, Any]], steps: int) -> dict[str, tuple[Any, Any]]:
    """Train `Echo` by each case's options; return weights and what is owed after so many steps."""
    return {name: _train_sparse(rank, dict(case), steps) for name, case in cases.items()}


def _train_sparse(rank: int, options: dict[str, Any], steps: int) -> tuple[Any, Any]:
    accumulate, resumed = options.pop("accumulate", 1), options.pop("resumed", False)
    module = Echo()
    wrapper = OurDDP(module, **options)
    for step in range(steps):
        if resumed and step == steps // 2:  # a checkpoint, and a fresh wrapper that goes on from it
            states: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(states, wrapper.exchange_state_dict())
            wrapper = OurDDP(module, **options)
            wrapper.load_exchange_state_dict(states)
        for number in range(step * accumulate, (step + 1) * accumulate):
            with wrapper.no_sync() if (number + 1) % accumulate else nullcontext():
                wrapper(random_inputs(rank, number)).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= parameter.grad
                parameter.grad = None
    owed = wrapper.exchange_state_dict()["memories"]["residual"]
    kept = torch.cat([owed.get(name, torch.zeros(0)) for name in ("first", "second")])
    return torch.cat([module.first, module.second]).detach().numpy(), kept.numpy()


def echo_plan(codec: str, strategy: str = "gtopk") -> Plan:
    bucket = Bucket(("second", "first"), 228, strategy, codec)
    return Plan("echo", 2, "hand", (bucket,))


def densities(rank: int) -> list[int]:
    """Return how many elements of `Echo` each iteration changes while the density warms up."""
    module = Echo()
    plan = echo_plan("sparse(density=0.01)")
    wrapper = OurDDP(module, codec="gtopk", density=0.01, warmup=[0.5, 0.25], warmup_every=2, plan=plan)
    found = []
    for step in range(7):
        wrapper(echo_inputs(rank, step)).backward()
        found.append(int(sum((each.grad != 0).sum() for each in module.parameters())))
        wrapper.zero_grad()
    return found


def echo_auto(rank: int, seconds_per_byte: float) -> dict[str, Any]:
    """Let the wrapper decide whether to compress, where a compressed byte costs so much and a dense one 1e-3."""
    curve = Curve(1e-12, 1e-9)
    lines = {"native": LinearCost(1e-4, 1e-3), **dict.fromkeys(ONEBIT, LinearCost(1e-4, seconds_per_byte))}
    network = Network(2, 1e-4, 1e-3, 1e-10, lines, {"onebit": CodecCurves(1 / 32, curve, curve)})
    return _echo(rank, {"codec": "auto", "network": network}, 8)


def drift_away(rank: int) -> tuple[str, str, str, bool]:
    """Plan for a network where startups take a second, and let the wrapper find out that they do not."""
    lines = {"native": LinearCost(1.0, 1e-9)}
    wrapper = OurDDP(
        plain(),
        strategy="native",
        network=Network(2, 1.0, 1e-9, 1e-10, lines),
        profile_iterations=2,
        replan_drift=0.5,
    )
    hashes = []
    wrapper._conductor._measure = lambda: Network(2, 0.0, 1e-6, 1e-10, {"native": LinearCost(0.0, 1e-6)})
    for step in range(26):
        _loss(wrapper, rank, step, {}).backward()
        hashes.append(wrapper.plan.hash if wrapper.plan else "")
    weights = next(wrapper.parameters()).detach().clone()
    mine = weights.clone()
    dist.broadcast(weights, 0)
    return hashes[4], hashes[-1], wrapper.explain(), torch.equal(mine, weights)


def timelines(rank: int) -> tuple[Any, Any, list[str]]:
    """Return the measured timelines of a wrapper that uses the engine and of one that uses a ring."""
    found, planned = [], []
    for strategy in ("native", "ring"):
        wrapper = OurDDP(plain(), strategy=strategy, planner="wfbp", **QUICK)
        assert wrapper.measured_timeline() is None
        for step in range(7):
            _loss(wrapper, rank, step, {}).backward()
        found.append(wrapper.measured_timeline())
        assert "measured compute " in wrapper.explain(picture=True)
        assert "predicted network " in wrapper.explain(picture=True)
        planned = [bucket.name for bucket in wrapper.plan.buckets]
    return found[0], found[1], planned


def measure_twice(rank: int, folder: str) -> tuple[Network, Network, Network, int]:
    """Measure into a folder, again, and with one more line; return the networks and how many files there are.

    What is measured is made up: each time it is another network.
    """
    count = itertools.count(1)
    measuring._measure = lambda _group, routes, _device, _seconds: Network(
        2, next(count), 1e-9, 1e-10, {str(route): LinearCost(1e-4, 1e-9) for route in routes}
    )
    group, cpu, routes = dist.group.WORLD, torch.device("cpu"), [Route("native")]
    first, again = (measuring.measure(group, routes, cpu, folder) for _ in range(2))
    another = measuring.measure(group, [*routes, Route("ring")], cpu, folder)
    dist.barrier()
    return first, again, another, len(os.listdir(folder))


def measure_on_device(rank: int) -> Network:
    """Measure as with NCCL, on the device that is there; again where a busy machine spoils it, on all ranks alike."""
    for _ in range(5):
        with suppress(FitError):
            return measure_device_network(dist.group.WORLD, torch.device("cpu"), seconds=1.0)
    raise AssertionError("five measurements in a row could not be fitted")
