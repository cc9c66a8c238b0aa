"""What each process of a wrapper test does: train a small model with torch's DDP or ours, and report."""

import copy
import gc
import io
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from penstock.errors import FitError, PlanError
from penstock.network import LinearCost, Network
from penstock.plan import Bucket, Plan, Route
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch import comm_hook, layered, synchronous
from penstock.torch.layers import Staging
from penstock.torch.overlap import BulkSynchronous

CODECS = ("onebit", "terngrad", "tbq", "topk(density=0.25)")
ROUTES = (
    "native",
    *(f"{name}+{codec}" for name in ("ring", "parameter_server", "all_gather", "linear_pipeline") for codec in CODECS),
    *(f"{name}+sparse(density=0.1)" for name in ("gtopk", "gtopk_doubling", "topk_allgather")),
    *(f"hierarchical(outer=ring)+{codec}" for codec in CODECS),  # ranks of tests share a host
    *(f"hierarchical(outer={name})+sparse(density=0.1)" for name in ("gtopk_doubling", "topk_allgather")),
)
NETWORK = Network(2, 1e-4, 1e-9, 1e-10, dict.fromkeys(ROUTES, LinearCost(1e-4, 1e-9)))  # for tests that do not measure


def quick() -> dict[str, Any]:
    """Options that neither measure nor profile for long, for as many workers as there are."""
    return {"network": replace(NETWORK, workers=dist.get_world_size()), "profile_iterations": 2, "measure_seconds": 0.5}


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


class Attentive(nn.Module):
    """Attention reads the weights of its output layer by itself, and this model those of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.listed = nn.ParameterList([torch.randn(8, 8), torch.randn(8, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.attention(x, x, x)
        return torch.tanh(mixed @ self.listed[0]) @ self.listed[1]


MODELS = {
    "attentive": Attentive,
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
    _evaluate(wrapper, how.get("evaluates", ()), rank, 3)
    for step in range(iterations):
        _evaluate(wrapper, how.get("evaluates", ()), rank, step)
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
        found[name] = train(rank, model, False, theirs, **how), train(rank, model, True, quick() | theirs | ours, **how)
    return found


def _evaluate(wrapper: nn.Module, ranks: Sequence[int], rank: int, times: int) -> None:
    """Run forward passes that no backward pass follows, on some ranks only, and forget `no_grad`."""
    if rank in ranks:
        wrapper.eval()
        for step in range(times):
            _loss(wrapper, rank, step, {})
        wrapper.train()


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


def follow_buckets(rank: int, planner: str, bulk: bool) -> list[list[int]]:
    """Return, for each iteration, the bytes of the buckets that a user's hook sees."""
    seen: list[list[int]] = [[]]

    def watch(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _watch(seen, bucket)

    network = replace(
        NETWORK, all_reduce={"native": LinearCost(9.0, 0.0)}
    )  # whatever a message holds, it takes as long
    wrapper = OurDDP(plain(), planner=planner, strategy="native", network=network, profile_iterations=2, bulk=bulk)
    wrapper.register_comm_hook(None, watch)
    for step in range(6):
        _loss(wrapper, rank, step, {}).backward()
        seen.append([])
    planned = [bucket.nbytes for bucket in wrapper.plan.buckets]
    return [*seen[:-1], planned]


def _watch(state: list[list[int]], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state[-1].append(bucket.buffer().nbytes)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def watch_sending(rank: int) -> tuple[int, int, int, float]:
    """Return bytes and iterations that were noted while profiling, the model's bytes, and the slowdown found."""
    slow = replace(NETWORK, all_reduce={"native": LinearCost(9.0, 0.0)})  # whatever is measured took less
    wrapper = OurDDP(plain(), strategy="native", network=slow, profile_iterations=4)
    for step in range(6):
        _loss(wrapper, rank, step, {}).backward()
    sending = wrapper._planning._sending
    nbytes = sum(parameter.nbytes for parameter in wrapper.parameters())
    return sum(sending.nbytes), len(sending.ends), nbytes, wrapper.decision.slowdown


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


def different_plans(rank: int) -> list[str]:
    """Give the ranks things that do not belong together, or not to the model; return what each is told."""
    whole = Bucket(("bias", "weight"), 12, "native")
    halves = Bucket(("bias",), 4, "native"), Bucket(("weight",), 8, "native")
    another = Bucket(("head.bias", "weight"), 12, "native")
    cases = [
        {"plan": Plan("m", 2, "hand", halves if rank else (whole,))},
        {"network": None if rank else NETWORK},
        {"plan": Plan("m", 2, "hand", (another if rank else whole,))},
        {"network": replace(NETWORK, workers=64)},
        {"codec": "onebit" if rank else None},
        {"codec": "gtopk", "warmup": "dgc" if rank else "paper"},
        {"profile_iterations": 5 + rank},
        {"clip": 1.0 + rank},
    ]
    return [_refusal(options) for options in cases]


def _refusal(options: dict[str, Any]) -> str:
    try:
        OurDDP(nn.Linear(2, 1), **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def drop_wrappers(rank: int) -> tuple[list[str], int]:
    """Make wrappers of one module and drop them; return the threads that are left, and how many hooks on parameters."""
    module = nn.Linear(4, 4)
    for _ in range(3):
        wrapper = OurDDP(module, codec="onebit", momentum=0.9)
        wrapper(torch.ones(1, 4)).sum().backward()
        del wrapper
        gc.collect()
    deadline = monotonic() + 60  # a thread ends soon after its pool is gone, not at once
    while (left := [each.name for each in threading.enumerate() if "penstock" in each.name]) and monotonic() < deadline:
        sleep(0.01)
    return left, sum(len(each._post_accumulate_grad_hooks or ()) for each in module.parameters())


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
    """Train each (model, algorithm, strategy) of `penstock.torch.overlap`, and the model with torch's wrapper."""
    found = {}
    for model, algorithm, strategy in cases:
        layered.Split.least_nbytes = 1 << 20 if model == "tied" else 0  # all layers together, and each by itself
        torch.manual_seed(1 + rank)  # ranks start apart: rank 0's weights count
        module = MODELS[model]()
        bsp = BulkSynchronous(module, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), algorithm, strategy)
        for step in range(12):
            _loss(bsp, rank, step, {}).backward()
            bsp.step()
        bsp.close()
        found[model, algorithm, strategy] = {"state": _arrays(module)}
    return found


class LateStaging(Staging):
    """Copies as late as it may, as a GPU does that is behind; what is lent is a copy, as there."""

    is_late = True

    def fetch(self, values: torch.Tensor | None, place: torch.Tensor, divide_by: int = 1) -> Callable[[], None]:
        place.fill_(float("nan"))

        def wait() -> None:
            sleep(0.001)
            super(LateStaging, self).fetch(values, place, divide_by)()

        return wait

    def lend(self, place: torch.Tensor) -> torch.Tensor:
        return place.clone()


def train_bulk_synchronous_late(
    rank: int, cases: list[tuple[str, str, str]]
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Do the same where gradients come to host memory late."""
    synchronous.staging_for = lambda _: LateStaging()
    return train_bulk_synchronous(rank, cases)


def train_bulk_synchronous_otherwise(rank: int, algorithms: list[str]) -> dict[str, dict[str, Any]]:
    """Add up two passes a step, under a schedule, and read the weights halfway; the same with torch's wrapper."""
    layered.Split.least_nbytes = 0
    torch.manual_seed(1)
    wrapper = TorchDDP(plain())
    found = {"torch": _train_scheduled(wrapper, rank, [_adam(wrapper.parameters())])}
    for algorithm in algorithms:
        torch.manual_seed(1)
        bsp = BulkSynchronous(plain(), _adam, algorithm)
        found[algorithm] = _train_scheduled(bsp, rank, bsp.optimizers)
        bsp.close()
    return found


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def _train_scheduled(wrapper: Any, rank: int, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in optimizers]
    halfway = {}
    for step in range(8):
        with wrapper.no_sync():
            _loss(wrapper, rank, 2 * step, {}).backward()
        _loss(wrapper, rank, 2 * step + 1, {}).backward()
        for each in [wrapper] if hasattr(wrapper, "step") else optimizers:
            each.step()
        for each in [] if hasattr(wrapper, "step") else optimizers:
            each.zero_grad()
        for schedule in schedules:
            schedule.step()
        if step == 3:
            halfway = _arrays(wrapper.module)
    return {"halfway": halfway, "state": _arrays(wrapper.module)}


def pass_backward_twice(rank: int, algorithm: str, says_so: bool) -> dict[str, Any]:
    """Run two backward passes before a step, and say so too late or not at all."""
    bsp = BulkSynchronous(plain(), _adam, algorithm)
    _loss(bsp, rank, 0, {}).backward()
    try:
        with bsp.no_sync() if says_so else nullcontext():
            _loss(bsp, rank, 1, {}).backward()
    except PlanError as error:
        return {"message": str(error)}
    return {"message": ""}


def _arrays(module: nn.Module) -> dict[str, Any]:
    return {name: value.clone().numpy() for name, value in module.state_dict().items()}


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
        found[model] = {"state": _arrays(wrapper.module)}
    return found


def train_without_a_measurable_network(rank: int) -> dict[str, Any]:
    """Let measuring fail, as it may on a machine that does too much else."""
    torch.manual_seed(1)
    wrapper = OurDDP(plain(), profile_iterations=2)

    def fail(_: Network | None) -> tuple[Network, tuple[Route, ...]]:
        raise FitError("point-to-point times do not grow with size")

    wrapper._planning._survey = fail
    return _train_few(wrapper, rank) | {"explain": wrapper.explain()}
