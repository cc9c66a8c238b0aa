"""What each process of a test of compressed training does: a model whose gradients are its inputs, and what is owed."""

import copy
import pickle
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from penstock.curves import CodecCurves, Curve
from penstock.errors import CodecError, NonFiniteError, PlanError
from penstock.network import LinearCost, Network
from penstock.plan import Bucket, Plan
from penstock.planning.planning import Decision
from penstock.torch import BulkSynchronous, comm_hook
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.trace import Tensor, Trace
from torch_training import _loss, _watch, plain, quick


class Echo(nn.Module):
    """Two weights whose gradients are the inputs: what was applied can be counted to the bit."""

    def __init__(self, dtype: torch.dtype = torch.float32, second: tuple[int, ...] = (20,)) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((37,), second))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.cat([self.first, self.second.flatten()]) * x).sum()


def echo_inputs(rank: int, step: int) -> torch.Tensor:
    """Dyadic values: sums of some hundred of them are exact in float32."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-512, 513, (57,), generator=generator) / 64


def echo(rank: int, cases: dict[str, dict[str, Any]], steps: int = 8) -> dict[str, dict[str, Any]]:
    """Apply the gradients of `Echo` by each case's wrapper; return what was applied and what is still owed."""
    return {name: _echo(rank, case, steps) for name, case in cases.items()}


def _echo(rank: int, options: dict[str, Any], steps: int) -> dict[str, Any]:
    chosen = dict(options)
    module = Echo(getattr(torch, chosen.pop("dtype", "float32")), chosen.pop("second", (20,)))
    wrapper = OurDDP(module, **quick() | chosen)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
    for step in range(steps):
        wrapper(echo_inputs(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = wrapper.exchange_state_dict()
    owed = state["memories"]["residual"]
    traffic = wrapper.bytes_sent()
    return {
        "applied": -torch.cat([module.first, module.second.flatten()]).detach().float().numpy(),
        "owed": torch.cat(
            [owed.get(name, torch.zeros(each.numel())).flatten() for name, each in module.named_parameters()]
        ).numpy(),
        "iterations": state["iterations"],
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
        "refused": _refused(second, states),
    }


def _refused(wrapper: Any, states: list[Any]) -> list[str]:
    """Return what is said of a state with another model's names, and of joining by the ranks that are left."""
    told = []
    for call in (
        lambda: wrapper.load_exchange_state_dict([_renamed(state, "third") for state in states]),
        lambda: wrapper.load_exchange_state_dict([_renamed(state, "_orig_mod.first") for state in states]),
        lambda: wrapper.join(divide_by_initial_world_size=False),
    ):
        try:
            call()
            told.append("")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def _renamed(state: dict[str, Any], first: str) -> dict[str, Any]:
    """Return a state of `Echo` whose first tensor is called otherwise."""
    kept = dict(state["memories"]["residual"])
    return {**state, "memories": {"residual": {first: kept.pop("first"), **kept}, "velocity": {}}}


def go_on_with_other_workers(rank: int, codec: str, folder: str, before: int) -> dict[str, Any]:
    """Load what `before` ranks left in a folder, train on, and return what was applied and is owed."""
    states = [torch.load(f"{folder}/{each}.pt") for each in range(before)]
    wrapper, module = _train_echo(rank, codec, range(4), Echo(), states)
    kept = wrapper.exchange_state_dict()["memories"]["residual"]  # one worker keeps nothing
    return {
        "applied": -torch.cat([module.first, module.second]).detach().numpy(),
        "owed": torch.cat([kept.get(name, torch.zeros_like(each)) for name, each in module.named_parameters()])
        .detach()
        .numpy(),
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
    wrapper = OurDDP(Echo(), **quick() | options)
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


def static_graph_clipped(rank: int) -> tuple[list[float], str]:
    """Clip by our hook in a static graph of two buckets, with frozen and ignored parameters; then without module=."""
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(60)) for name in ("a", "b", "frozen")})
    module["frozen"].requires_grad_(False)
    outer = nn.ModuleDict({"used": module, "ignored": nn.ParameterDict({"c": nn.Parameter(torch.zeros(60))})})
    TorchDDP._set_params_and_buffers_to_ignore_for_model(outer, ["ignored.c"])
    outer.forward = lambda: sum(each.sum() for each in outer.parameters())
    found = []
    for given in (outer, None):
        wrapper = TorchDDP(outer, static_graph=True, bucket_cap_mb_list=[2e-4, 2e-4])
        wrapper.register_comm_hook(*comm_hook("ring", clip=1.0, module=given))
        wrapper.zero_grad()
        try:
            wrapper().backward()
        except PlanError as error:
            return found, str(error)
        found += [float(module[name].grad.norm()) for name in ("a", "b")]
    return found, "no error"


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
    wrapper = OurDDP(plain(), **quick() | options)
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
    wrapper = TorchDDP(module) if options is None else OurDDP(module, **{"codec": "gtopk", "momentum": 0.5} | options)
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


def echo_plan(codec: str, strategy: str = "gtopk", workers: int = 2) -> Plan:
    bucket = Bucket(("second", "first"), 228, strategy, codec)
    return Plan("echo", workers, "hand", (bucket,))


def half_compressed(codec: str) -> Plan:
    """Return a plan whose first bucket travels dense, by the engine."""
    buckets = Bucket(("second",), 80, "native"), Bucket(("first",), 148, "ring", codec)
    return Plan("echo", 2, "hand", buckets)


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


def entries_of_a_model_without_a_plan(rank: int) -> str:
    """Return what is said where the largest entries of a model are asked for, and its types allow no plan."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    try:
        OurDDP(module, codec="gtopk", select="model", planner="single")
    except CodecError as error:
        return str(error)
    return "nothing"


def mixed_options(planner: str, codec: str) -> dict[str, Any]:
    """Return options with which a planner compresses the larger of `Echo`'s weights only, in eight pieces.

    The second, of 80 bytes, is ready 2 s before the first: it takes 1.2 s dense and 1.24 s compressed, which is hidden.
    The first, of 148 bytes, takes 2.22 s dense, 1.64 s compressed and 1.44 s in eight pieces; with the second, 1.68 s,
    which is too much for a tie.
    """
    lines = {"ring": LinearCost(0.0, 15e-3)}
    lines |= {f"ring+{codec}": LinearCost(1.2, 3e-3), f"ring+{codec}/8": LinearCost(1.0, 3e-3)}
    trace = Trace("echo", "cpu", 1, "float32", 0.0, (Tensor("second", 20, 1e-3), Tensor("first", 37, 2.0)))
    network = Network(2, 1e-4, 1e-9, 1e-10, lines)
    return {"codec": codec, "planner": planner, "strategy": "ring", "network": network, "trace": trace}


def change_plans(rank: int, codec: str, steps_each: int = 2) -> list[dict[str, Any]]:
    """Train `Echo` by one plan after another, compressed and dense in turn; return all that was known after each."""
    bucket = {"both": ("second", "first"), "second": ("second",), "first": ("first",)}
    nbytes = {"both": 228, "second": 80, "first": 148}
    plans = [
        [("both", "ring", codec, 1)],
        [("second", "native", None, 1), ("first", "parameter_server", codec, 3)],
        [("second", "parameter_server", codec, 2), ("first", "parameter_server", None, 3)],
        [("both", "ring", codec, 8)],
        [("both", "native", None, 1)],
        [("second", "all_gather", codec, 1), ("first", "ring", codec, 5)],
    ]
    module, found = Echo(), []
    wrapper, step = None, 0
    for routes in plans:
        buckets = (Bucket(bucket[name], nbytes[name], *route) for name, *route in routes)
        plan = Plan("echo", dist.get_world_size(), "hand", tuple(buckets))
        if wrapper is None:
            wrapper = OurDDP(module, plan=plan)
        else:
            wrapper._planning._adopt(Decision(plan))  # as when it plans again
        for _ in range(steps_each):
            wrapper(echo_inputs(rank, step)).backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= parameter.grad
                    parameter.grad = None
            step += 1
        owed = wrapper.exchange_state_dict()["memories"]["residual"]
        found.append(
            {
                "steps": step,
                "applied": -torch.cat([module.first, module.second]).detach().numpy(),
                "owed": torch.cat([owed.get(n, torch.zeros(p.numel())) for n, p in module.named_parameters()]).numpy(),
                "dense": all(route[1] is None for _, *route in routes),
            }
        )
    return found


def echo_auto(rank: int, seconds_per_byte: float) -> dict[str, Any]:
    """Let the wrapper choose, where a byte costs 1e-3 dense, half of that by bf16, and so much by onebit."""
    lines = {"ring": LinearCost(1e-4, 1e-3), "ring+bf16": LinearCost(1e-4, 5e-4), "ring+bf16/8": LinearCost(1e-4, 1.0)}
    lines |= dict.fromkeys(("ring+onebit", "ring+onebit/8"), LinearCost(1e-4, seconds_per_byte))
    curve = Curve(1e-12, 1e-9)
    network = Network(2, 1e-4, 1e-3, 1e-10, lines, dict.fromkeys(("onebit", "bf16"), CodecCurves(1 / 32, curve, curve)))
    options = {"codec": "auto", "candidates": ["bf16", "onebit"], "strategy": "ring", "network": network}
    return _echo(rank, options, 8)


def recover(rank: int) -> list[Any]:
    """Have NaN on rank 1 raised, load the state from before and go on; return what was raised and what is right."""
    wrapper = OurDDP(module := Echo(), **quick(), codec="topk", density=0.1)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
    states: list[Any] = [None] * dist.get_world_size()
    raised = []
    for step in range(8):
        dist.all_gather_object(states, wrapper.exchange_state_dict())
        bad = torch.full((57,), float("nan") if rank == 1 and step == 5 else 0.0)
        try:
            wrapper(echo_inputs(rank, step) + bad).backward()
            optimizer.step()
        except NonFiniteError as error:
            raised.append(str(error))
            wrapper.load_exchange_state_dict(states)
        optimizer.zero_grad()
    owed = wrapper.exchange_state_dict()["memories"]["residual"]
    applied = -torch.cat([module.first, module.second]).detach()
    wanted = sum(echo_inputs(rank, step) for step in range(8) if step != 5) / dist.get_world_size()
    return [raised, applied.numpy(), torch.cat([owed["first"], owed["second"]]).numpy(), wanted.numpy()]


def copies(rank: int) -> list[bool]:
    """Copy and pickle a wrapper that owes something; return whether the twins owe the same and train alike."""
    wrapper = OurDDP(Echo(), **quick(), codec="topk", density=0.1, momentum=0.5)
    steps = iter(range(20))

    def train(one: OurDDP, step: int) -> torch.Tensor:
        one(echo_inputs(rank, step)).backward()
        with torch.no_grad():
            for parameter in one.parameters():
                parameter -= parameter.grad
                parameter.grad = None
        return torch.cat([parameter.detach() for parameter in one.parameters()])

    for step in steps:
        train(wrapper, step)
        if step == 4:
            break
    twins = [wrapper, copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))]
    owed = [torch.cat(list(one.exchange_state_dict()["memories"]["residual"].values())) for one in twins]
    ends = [train(one, 5) for one in twins[1:]]  # the first iteration of a new reducer has other buckets
    ends = [train(one, 6) for one in twins[1:]]
    return [bool(owed[0].any()), *(torch.equal(owed[0], each) for each in owed[1:]), torch.equal(*ends)]


def halves(rank: int) -> list[Any]:
    """Train even and odd ranks by themselves, in groups that only they know of; return what each rank applied."""
    groups = [dist.new_group([other for other in range(4) if other % 2 == side]) for side in (0, 1)]
    group, ends = groups[rank % 2], []
    network = replace(quick()["network"], workers=2)
    for codec in ({}, {"codec": "topk", "density": 1.0}):
        wrapper = OurDDP(
            module := Echo(), process_group=group, profile_iterations=2, measure_seconds=0.5, network=network, **codec
        )
        wrapper(echo_inputs(rank, 0)).backward()
        ends.append(torch.cat([module.first.grad, module.second.grad]).numpy())
    synchronous = BulkSynchronous(module := Echo(), partial(torch.optim.SGD, lr=1.0), process_group=group)
    synchronous(echo_inputs(rank, 0)).backward()
    synchronous.step()
    synchronous.close()
    return [*ends, -torch.cat([module.first, module.second]).detach().numpy()]
