r"""Sharded training between slow hosts: torch's own HSDP beside ours, and beside no traffic between hosts at all.

    python benchmarks/fsdp.py time OUT.json --rate 1gbit                     GPT of 31.7M parameters, 2 hosts x 2 ranks
    python benchmarks/fsdp.py time OUT.json --rate 10gbit --device cuda      GPT-2, four ranks on one GPU
    python benchmarks/fsdp.py loss OUT.json --steps 1000 --seconds 500       what AdamW learns; call it again to go on

Both start their ranks on emulated hosts, which needs root and pyroute2; `--device cuda` needs an NVIDIA GPU and Triton,
neither needs what penstock's command line does. `time` trains by all methods in turns, round by round, each once its
plan is in force; milliseconds are those of the slowest rank. `loss` trains by one method after the other on links
without a limit, from the same weights and the same batches of bytes of Python's manual, and keeps where it is in
OUT.state, so that it can be stopped after --seconds and called again.
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import cos, pi
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from penstock.bench.record import make_record, save_record
from penstock.cluster import emulated_cluster
from penstock.cluster.processes import RankZero
from penstock.plan import save_plan
from penstock.torch import fully_shard_with
from penstock.zoo.language_models import GPT, GptBlock

HOSTS, PER_HOST = 2, 2
CODEC = "blocks(bits=4)"
NONE, NATIVE, DENSE, CODED = "no traffic between hosts", "torch's HSDP", "ours, uncompressed", f"ours, {CODEC}"
METHODS = (NONE, NATIVE, DENSE, CODED)
PATIENCE = 20  # times three iterations until a plan is in force
KEPT_EVERY = 50  # steps of `loss`
RATE = 6e-4
LAST = 100  # steps whose losses are averaged at the end
Progress = Callable[..., None]


@dataclass(frozen=True)
class Model:
    """A GPT, and what a rank trains it with."""

    words: int
    width: int
    depth: int
    heads: int
    positions: int
    sequences: int  # of each rank and iteration
    tokens: int  # of each

    def build(self) -> GPT:
        """Return it, the same on every rank."""
        torch.manual_seed(0)
        return GPT(self.words, self.positions, self.width, self.depth, self.heads, dropout=0.0)


MODELS = {
    "gpt-32m": Model(256, 512, 10, 8, 128, 1, 64),
    "gpt2": Model(50257, 768, 12, 12, 1024, 8, 256),
    "gpt-1m": Model(256, 128, 4, 4, 128, 2, 64),  # to try this script
}


@dataclass(frozen=True)
class Job:
    """What ranks are started with."""

    task: str  # time or loss
    out: str
    device: str
    model: str
    rate: str
    rounds: int
    iterations: int
    steps: int
    seconds: float  # after which nothing new is begun
    bf16: bool  # weights of forward and backward; sums stay float32
    keeps_weights: bool  # after a forward pass
    measure_seconds: float
    sequences: int  # of each rank and iteration; 0: the model's own
    tokens: int  # of each; 0: the model's own
    methods: Sequence[str] = METHODS
    command: str = ""

    @property
    def shape(self) -> Model:
        """The model, with the batch that was asked for."""
        found = MODELS[self.model]
        return replace(found, sequences=self.sequences or found.sequences, tokens=self.tokens or found.tokens)


# What each rank does.


def sharded(job: Job, method: str, mesh: DeviceMesh, plan: Path | None = None) -> Any:
    """Return the model, sharded for a method; `plan`, where there is that file, is kept from a call before."""
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
    model = job.shape.build().to(device)
    options: dict[str, Any] = {"reshard_after_forward": False} if job.keeps_weights else {}
    if job.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if method in (NONE, NATIVE):
        where = mesh["shard"] if method == NONE else mesh
        for block in model.transformer.h:
            fully_shard(block, mesh=where, **options)
        return fully_shard(model, mesh=where, **options)
    asked: dict[str, Any] = {} if method == DENSE else {"codec": method.removeprefix("ours, "), "measurements": False}
    if asked:
        asked |= {"measure_seconds": job.measure_seconds, "plan": plan if plan is not None and plan.exists() else None}
    return fully_shard_with(model, mesh, layers=GptBlock, **asked, **options)


def text() -> torch.Tensor:
    """Return Python's manual as bytes."""
    from pydoc_data.topics import topics

    return torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def batch_of(model: Model, data: torch.Tensor | None, rank: int, step: int) -> torch.Tensor:
    """Return sequences that depend on rank and step alone: of a text, or random."""
    generator = torch.Generator().manual_seed(10_000 * step + rank)
    shape = (model.sequences, model.tokens + 1)
    if data is None:
        return torch.randint(model.words, shape, generator=generator)
    starts = torch.randint(len(data) - model.tokens - 1, (model.sequences,), generator=generator)
    return torch.stack([data[start : start + model.tokens + 1] for start in starts.tolist()]).long()


def one_step(model: Any, optimizer: torch.optim.Optimizer, words: torch.Tensor) -> torch.Tensor:
    """Train on a batch; return its loss."""
    optimizer.zero_grad(set_to_none=True)
    logits = model(words[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


class Contestant:
    """A training by one method."""

    def __init__(self, job: Job, method: str, mesh: DeviceMesh) -> None:
        self.model = sharded(job, method, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        words = batch_of(job.shape, None, dist.get_rank(), 0)
        self._words = words.to("cuda" if job.device == "cuda" else "cpu")
        self.steps(2)
        if method == CODED:
            for _ in range(PATIENCE):  # it profiles, measures and plans
                if self.model.plan is not None:
                    break
                self.steps(3)
        self.steps(2)

    def steps(self, count: int) -> None:
        """Do some iterations and wait for the device."""
        for _ in range(count):
            one_step(self.model, self.optimizer, self._words)
        if self._words.is_cuda:
            torch.cuda.synchronize()

    def ms(self, iterations: int) -> list[float]:
        """Return milliseconds of each iteration, on the slowest rank."""
        self.steps(1)  # others have trained since
        found = []
        for _ in range(iterations):
            dist.barrier()
            start = time.perf_counter()
            self.steps(1)
            found.append(round(max(gathered(time.perf_counter() - start)) * 1e3, 2))
        self.optimizer.zero_grad(set_to_none=True)
        return found


def gathered(value: Any) -> list[Any]:
    """Return every rank's value."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def time_methods(job: Job, mesh: DeviceMesh, say: Progress) -> None:
    """Time all methods in turns; write the record after each round."""
    begun, contestants = time.time(), {}
    for method in job.methods:
        gc.collect()
        contestants[method] = Contestant(job, method, mesh)
        say(method, "is ready")
    numel = sum(each.numel() for each in contestants[job.methods[0]].model.parameters())
    rows: dict[str, list[float]] = {method: [] for method in job.methods}
    for turn in range(job.rounds):
        for method, contestant in contestants.items():
            rows[method] += contestant.ms(job.iterations)
        say("round", turn, {method: median(ms) for method, ms in rows.items()})
        decided = {method: each.model.explain() for method, each in contestants.items() if method in (DENSE, CODED)}
        if dist.get_rank() == 0:
            write_times(job, rows, decided, numel)
        if from_first(time.time() - begun > job.seconds):
            break
    for text_ in decided.values():
        say(text_)


def write_times(job: Job, rows: dict[str, list[float]], decided: dict[str, str], numel: int) -> None:
    """Write the record of `time`."""
    medians = {method: median(ms) for method, ms in rows.items()}
    best = {method: min(ms) for method, ms in rows.items()}
    claims = []
    if {NATIVE, CODED, NONE} <= set(medians):
        claims = [
            claim("torch's HSDP over ours with the codec, medians", medians[NATIVE] / medians[CODED], 2.0),
            claim("ours with the codec over no traffic, medians", medians[CODED] / medians[NONE], 1.15, at_most=True),
        ]
    documents = [
        {
            "method": method, "model": job.model, "parameters": numel, "device": job.device, "rate": job.rate,
            "hosts": HOSTS, "ranks_per_host": PER_HOST, "median_ms": medians[method], "best_ms": best[method],
            "ms_per_iteration": ms,
        }
        for method, ms in rows.items()
    ]  # fmt: skip
    write(job, documents, claims, decided=decided)


def claim(text_: str, value: float, wanted: float, at_most: bool = False) -> dict[str, Any]:
    """Return a ratio beside what is wanted of it, as `study.py` writes it, which needs typer."""
    holds = value <= wanted if at_most else value >= wanted
    return {"text": text_, "value": value, "wanted": wanted, "at_most": at_most, "holds": holds}


def write(job: Job, rows: Sequence[dict[str, Any]], claims: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write a record, with the command that started the ranks."""
    record = make_record(f"fsdp-{job.task}", rows, claims=list(claims), job=asdict(job), **more)
    record["command"] = job.command
    if job.device == "cuda":
        record["machine"]["gpus"] = f"1 x {torch.cuda.get_device_name(0)}, shared by all ranks"
    save_record(record, job.out)


def learn(job: Job, mesh: DeviceMesh, say: Progress) -> None:
    """Train by each method for as long as there is time; keep where it is, and write what was learnt so far."""
    begun, losses = time.time(), dict[str, list[float]]()
    folder, data = Path(f"{job.out}.state"), text()
    for method in job.methods:
        losses[method] = []
        for found in learning(job, method, mesh, folder / method.replace(" ", "-"), data):
            losses[method] += found
            say(method, len(losses[method]), losses[method] and round(mean(losses[method][-LAST:]), 4))
            if dist.get_rank() == 0:
                write_losses(job, losses)
            if from_first(time.time() - begun > job.seconds):
                say("time is over; call this again to go on")
                return


def learning(job: Job, method: str, mesh: DeviceMesh, folder: Path, data: torch.Tensor) -> Iterator[list[float]]:
    """Yield losses, averaged over all ranks: first those of calls before, then of KEPT_EVERY steps at a time."""
    model = sharded(job, method, mesh, folder / "plan.json")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    rank, done, own = dist.get_rank(), list[float](), folder / f"rank-{dist.get_rank()}.pt"
    folder.mkdir(parents=True, exist_ok=True)
    if own.exists():
        done = load(own, model, optimizer, method)
    yield done
    for first in range(len(done), job.steps, KEPT_EVERY):
        found = []
        for step in range(first, min(first + KEPT_EVERY, job.steps)):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, job.steps)
            words = batch_of(job.shape, data, rank, step).to("cuda" if job.device == "cuda" else "cpu")
            found.append(one_step(model, optimizer, words))
        losses = torch.stack(found)
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        done = done + losses.tolist()
        save(own, model, optimizer, method, done)
        yield losses.tolist()


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate: 100 steps of rise, then a cosine down to a tenth."""
    return RATE * min(1.0, (step + 1) / 100) * (0.55 + 0.45 * cos(pi * step / steps))


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, method: str, losses: list[float]) -> None:
    """Keep this rank's part of everything."""
    state: dict[str, Any] = {"losses": losses, "optimizer": optimizer.state_dict(), "model": model.state_dict()}
    if method == CODED:
        state["exchange"] = model.exchange_state_dict()
        if dist.get_rank() == 0:
            save_plan(model.plan, path.parent / "plan.json")
    part = path.with_suffix(".part")
    torch.save(local(state), part)
    dist.barrier()
    os.replace(part, path)


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer, method: str) -> list[float]:
    """Take this rank's part of everything back."""
    state = torch.load(path, weights_only=False, map_location="cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(state["model"][name])
    optimizer.load_state_dict(optimizer.state_dict() | {"param_groups": state["optimizer"]["param_groups"]})
    for parameter, kept in zip(model.parameters(), state["optimizer"]["state"].values(), strict=True):
        optimizer.state[parameter] = {
            name: like(parameter, value) if value.ndim else value.cpu() for name, value in kept.items()
        }
    if method == CODED:
        now = model.exchange_state_dict()
        for name, value in now.get("residual", {}).items():
            value.to_local().copy_(state["exchange"]["residual"][name])
        model.load_exchange_state_dict(now | {key: state["exchange"][key] for key in ("iterations", "scale")})
    losses: list[float] = state["losses"]
    return losses


def like(parameter: Any, values: torch.Tensor) -> Any:
    """Return this rank's part of something as a DTensor that is cut as a parameter is."""
    found: Any = torch.zeros_like(parameter)
    found.to_local().copy_(values)
    return found


def local(state: Any) -> Any:
    """Return a state with this rank's parts in the place of DTensors."""
    if isinstance(state, dict):
        return {name: local(value) for name, value in state.items()}
    if isinstance(state, list):
        return [local(each) for each in state]
    return state.to_local() if hasattr(state, "to_local") else state


def write_losses(job: Job, losses: dict[str, list[float]]) -> None:
    """Write the record of `loss`."""
    rows = [
        {"method": method, "model": job.model, "steps": len(found), "losses": [round(each, 5) for each in found],
         "last": mean(found[-LAST:]) if found else None}
        for method, found in losses.items()
    ]  # fmt: skip
    both = [losses.get(method, []) for method in (NATIVE, CODED)]
    claims = []
    if all(len(each) == job.steps for each in both):
        native, ours = (mean(each[-LAST:]) for each in both)
        claims = [claim(f"ours over torch's HSDP, loss of the last {LAST} steps", ours / native, 1.01, at_most=True)]
    write(job, rows, claims)


def from_first(answer: bool) -> bool:
    """Return rank 0's answer on every rank."""
    answers = [answer]
    dist.broadcast_object_list(answers)
    return answers[0]


def be_a_rank(job: Job) -> None:
    """Do one rank's part."""
    torch.set_num_threads(1)
    if job.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    started = time.time()

    def say(*words: Any) -> None:
        if dist.get_rank() == 0:
            print(f"[{time.time() - started:6.1f}]", *words, flush=True)

    mesh = init_device_mesh(job.device, (HOSTS, PER_HOST), mesh_dim_names=("replicate", "shard"))
    try:
        (time_methods if job.task == "time" else learn)(job, mesh, say)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: NCCL's threads would wait for the other ranks
    os._exit(0)


# What starts them.


def main() -> None:
    """Start ranks on emulated hosts, or be one of them."""
    if sys.argv[1:2] == ["rank"]:
        be_a_rank(Job(**json.loads(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("time", "loss"))
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=tuple(MODELS), help="default: gpt2 for time on cuda, else gpt-32m")
    parser.add_argument("--rate", help="of each host's NIC; default: 1gbit for time, none for loss")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=6, help="of each method in a round")
    parser.add_argument("--steps", type=int, default=1000, help="of loss")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which no round, or step, is begun")
    parser.add_argument("--measure-seconds", type=float, default=10.0)
    parser.add_argument("--sequences", type=int, default=0, help="of each rank and iteration")
    parser.add_argument("--tokens", type=int, default=0, help="of each sequence")
    parser.add_argument("--bf16", action="store_true", help="weights in bf16, sums in float32")
    parser.add_argument("--keep-weights", action="store_true", help="after forward: reshard_after_forward=False")
    parser.add_argument("--methods", type=lambda given: tuple(given.split(";")), help="rows, with ; between them")
    options = parser.parse_args()
    times = options.task == "time"
    methods = options.methods or (METHODS if times else (NATIVE, CODED))
    if unknown := [each for each in methods if each not in METHODS]:
        parser.error(f"found {unknown[0]!r}; wanted any of {'; '.join(METHODS)}")
    job = Job(
        options.task,
        str(options.out.resolve()),
        options.device,
        options.model or ("gpt2" if times and options.device == "cuda" else "gpt-32m"),
        options.rate or ("1gbit" if times else "none"),
        options.rounds,
        options.iterations,
        options.steps,
        options.seconds,
        options.bf16,
        options.keep_weights,
        options.measure_seconds,
        options.sequences,
        options.tokens,
        methods,
        " ".join(["python", *sys.argv]),
    )
    gpus = "shared" if job.device == "cuda" else "none"
    with emulated_cluster(HOSTS, job.rate, gpus=gpus) as cluster:
        if cluster.gpu is not None and cluster.gpu.complaint:
            print(cluster.gpu.complaint, file=sys.stderr)
        first = RankZero()
        command = [sys.executable, str(Path(__file__).resolve()), "rank", json.dumps(asdict(job))]
        outcome = cluster.run(command, per_host=PER_HOST, sink=first)
        if outcome.exit_code:
            first.explain(outcome.failed_rank)
    sys.exit(outcome.exit_code)


if __name__ == "__main__":
    main()
