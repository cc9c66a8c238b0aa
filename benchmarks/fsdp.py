r"""Sharded training between slow hosts: torch's own HSDP beside ours, and beside no traffic between hosts at all.

    python benchmarks/fsdp.py time OUT.json --rate 1gbit --keep-weights      GPT of 31.7M parameters, 2 hosts x 2 ranks
    python benchmarks/fsdp.py time OUT.json --rate 10gbit --device cuda      GPT-2, four ranks on one GPU
    python benchmarks/fsdp.py loss OUT.json --device cuda --bf16 --keep-weights --sequences 16 --tokens 128 \
        --seeds 3 --data FOLDER --seconds 200                                what AdamW learns; call it again to go on
    python benchmarks/fsdp.py time OUT.json --across                         2 hosts x 1 rank: shards over the slow link

Both start their ranks on emulated hosts, which needs root and pyroute2; `--device cuda` needs an NVIDIA GPU and Triton,
neither needs what penstock's command line does. `time` trains by all methods in turns, round by round, each once its
plan is in force; milliseconds are those of the slowest rank, and those of processors the sum of all ranks.

`loss` trains by each method on links without a limit, from the same weights and the same batches of bytes: of FOLDER's
train.txt.xz (WikiText-2), or of Python's manual. It keeps where it is in OUT.state, so that it can be stopped after
--seconds and called again, by the same commit. What counts was fixed before it was run: the loss on text that no method
has seen (FOLDER's valid.txt.xz, or the last tenth of the manual) after all steps, in bits per byte, as a mean over the
seeds; ours may be 1% above that of torch's HSDP. With `--beside RECORD`, where torch's has not come as far here as in
an earlier record of the same job, it is taken from there: it need not be trained each time that ours has changed.

Of no traffic between hosts there are two rows: torch's FSDP inside each host, and ours, which exchanges shards directly
over gloo. Targets are of the first, what it costs to send anything at all shows beside the second.

`--across` is for models that no host holds: each of two hosts has one rank and half of all weights, and torch's
all-gathers and reduce-scatters cross the slow link: torch's own, and in fewer bits by `shard_codec`. Beside them stand
two replicas, where a host does hold the model.
"""

import argparse
import gc
import json
import lzma
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import cos, log, pi
from pathlib import Path
from pydoc_data.topics import topics
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
from penstock.torch.fsdp.sharding import ShardedModule
from penstock.zoo.language_models import GPT, GptBlock

HOSTS, PER_HOST = 2, 2
CODEC = "blocks(bits=4)"
NONE, NATIVE, DENSE, CODED = "no traffic between hosts", "torch's HSDP", "ours, uncompressed", f"ours, {CODEC}"
ALONE = "ours, no traffic between hosts"
METHODS = (NONE, ALONE, NATIVE, DENSE, CODED)
SHARDS, REPLICAS = "shards on two hosts: torch's FSDP", f"a replica on each host: ours, {CODEC}"
SHARD_CODECS = {f"shards on two hosts: ours, shard_codec={codec}": codec for codec in ("bf16", "blocks(bits=8)")}
ACROSS = (SHARDS, *SHARD_CODECS, REPLICAS)  # of --across
PLANNED = (CODED, REPLICAS)
NAMES = ("replicate", "shard")
PATIENCE = 20  # times three iterations until a plan is in force
PIECE = 250  # steps of `loss`, after which text that was held out is judged and everything kept
RATE = 6e-4
LAST = 100  # steps whose training losses are averaged at the end
HELD_OUT = 0.1  # of Python's manual, at its end
JUDGED, AT_A_TIME = 128, 8  # sequences of that for each rank
SAME = ("across", "model", "steps", "bf16", "sequences", "tokens", "data")  # of two jobs whose losses can be compared
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

    def build(self, seed: int) -> GPT:
        """Return it, the same on every rank."""
        torch.manual_seed(seed)
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
    across: bool  # shards lie on two hosts of one rank each
    model: str
    rate: str
    rounds: int
    iterations: int
    steps: int
    seeds: int
    seconds: float  # after which nothing new is begun
    bf16: bool  # weights of forward and backward; sums stay float32
    keeps_weights: bool  # after a forward pass
    measure_seconds: float
    sequences: int  # of each rank and iteration; 0: the model's own
    tokens: int  # of each; 0: the model's own
    data: str = ""  # folder of train.txt.xz and valid.txt.xz; empty: Python's manual
    beside: str = ""  # an earlier record of `loss`; empty: none
    methods: Sequence[str] = METHODS
    command: str = ""
    commit: str = ""

    @property
    def per_host(self) -> int:
        """Ranks of each host."""
        return 1 if self.across else PER_HOST

    @property
    def shape(self) -> Model:
        """The model, with the batch that was asked for."""
        found = MODELS[self.model]
        return replace(found, sequences=self.sequences or found.sequences, tokens=self.tokens or found.tokens)


# What each rank does.


def sharded(job: Job, method: str, mesh: DeviceMesh, plan: Path | None = None, seed: int = 0) -> Any:
    """Return the model, sharded for a method; `plan`, where there is that file, is kept from a call before."""
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
    model = job.shape.build(seed).to(device)
    options: dict[str, Any] = {"reshard_after_forward": False} if job.keeps_weights else {}
    if job.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if method in (NONE, NATIVE, SHARDS):
        where = {NONE: "shard", SHARDS: "replicate"}.get(method)
        for block in (*model.transformer.h, model):
            fully_shard(block, mesh=mesh if where is None else mesh[where], **options)
        return model
    if method == ALONE:
        mesh = init_device_mesh(job.device, (HOSTS, 1, job.per_host), mesh_dim_names=("host", *NAMES))[NAMES]
    elif method in SHARD_CODECS:
        mesh = init_device_mesh(job.device, (1, HOSTS), mesh_dim_names=NAMES)
        options["shard_codec"] = SHARD_CODECS[method]
    elif method in PLANNED:
        options |= {"codec": CODEC, "measurements": False, "measure_seconds": job.measure_seconds}
        options["plan"] = plan if plan is not None and plan.exists() else None
    return fully_shard_with(model, mesh, layers=GptBlock, **options)


def texts(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes that are trained on, and those that are held out."""
    if job.data:
        read = [lzma.decompress((Path(job.data) / f"{name}.txt.xz").read_bytes()) for name in ("train", "valid")]
    else:
        manual = "\n".join(topics[name] for name in sorted(topics)).encode()
        known = int((1 - HELD_OUT) * len(manual))
        read = [manual[:known], manual[known:]]
    trained, held_out = (torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in read)
    return trained, held_out


def batch_of(model: Model, data: torch.Tensor | None, rank: int, step: int, seed: int = 0) -> torch.Tensor:
    """Return sequences that depend on rank, step and seed alone: of a text, or random."""
    generator = torch.Generator().manual_seed(10**9 * seed + 10_000 * step + rank)
    shape = (model.sequences, model.tokens + 1)
    if data is None:
        return torch.randint(model.words, shape, generator=generator)
    starts = torch.randint(len(data) - model.tokens - 1, (model.sequences,), generator=generator)
    return sequences_at(starts.tolist(), data, model.tokens)


def sequences_at(starts: Sequence[int], data: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return sequences of a text, each with the token behind it."""
    return torch.stack([data[start : start + tokens + 1] for start in starts]).long()


def one_step(model: Any, optimizer: torch.optim.Optimizer, words: torch.Tensor) -> torch.Tensor:
    """Train on a batch; return its loss."""
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of(model, words)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def loss_of(model: Any, words: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of each token but the first, from those before it."""
    logits = model(words[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten())


class Contestant:
    """A training by one method."""

    def __init__(self, job: Job, method: str, mesh: DeviceMesh) -> None:
        self.model = sharded(job, method, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        words = batch_of(job.shape, None, dist.get_rank(), 0)
        self._words = words.to("cuda" if job.device == "cuda" else "cpu")
        self.steps(2)
        if method in PLANNED:
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

    def ms(self, iterations: int) -> tuple[list[float], list[float]]:
        """Return milliseconds of each iteration on the slowest rank, and those of processors on all ranks together."""
        self.steps(1)  # others have trained since
        walls, processors = [], []
        for _ in range(iterations):
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            self.steps(1)
            found = gathered((time.perf_counter() - start, time.process_time() - used))
            walls.append(round(max(wall for wall, _ in found) * 1e3, 2))
            processors.append(round(sum(processor for _, processor in found) * 1e3, 1))
        self.optimizer.zero_grad(set_to_none=True)
        return walls, processors


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
    processors: dict[str, list[float]] = {method: [] for method in job.methods}
    for turn in range(job.rounds):
        for method, contestant in contestants.items():
            walls, used = contestant.ms(job.iterations)
            rows[method] += walls
            processors[method] += used
        say("round", turn, {method: (median(ms), median(processors[method])) for method, ms in rows.items()})
        decided = {
            name: each.model.explain() for name, each in contestants.items() if isinstance(each.model, ShardedModule)
        }
        if dist.get_rank() == 0:
            write_times(job, rows, processors, decided, numel)
        if from_first(time.time() - begun > job.seconds):
            break
    for text_ in decided.values():
        say(text_)


def write_times(
    job: Job, rows: dict[str, list[float]], processors: dict[str, list[float]], decided: dict[str, str], numel: int
) -> None:
    """Write the record of `time`."""
    medians = {method: median(ms) for method, ms in rows.items()}
    best = {method: min(ms) for method, ms in rows.items()}
    claims = []
    if {NATIVE, CODED, NONE} <= set(medians):
        claims = [
            claim("torch's HSDP over ours with the codec, medians", medians[NATIVE] / medians[CODED], 2.0),
            claim("ours with the codec over no traffic, medians", medians[CODED] / medians[NONE], 1.15, at_most=True),
        ]
    if {ALONE, CODED} <= set(medians):
        claims += [
            claim("ours with the codec over ours without traffic, medians", medians[CODED] / medians[ALONE], 1.15, True)
        ]
    documents = [
        {
            "method": method, "model": job.model, "parameters": numel, "device": job.device, "rate": job.rate,
            "hosts": HOSTS, "ranks_per_host": job.per_host, "median_ms": medians[method], "best_ms": best[method],
            "ms_per_iteration": ms, "processor_ms": median(processors[method]),
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
    named = asdict(job)
    named |= {name: Path(named[name]).name for name in ("out", "data", "beside")}  # without folders of this machine
    record = make_record(
        "fsdp-across" if job.across else f"fsdp-{job.task}", rows, claims=list(claims), job=named, **more
    )
    record |= {"command": job.command, "commit": job.commit}
    if job.device == "cuda":
        record["machine"]["gpus"] = f"1 x {torch.cuda.get_device_name(0)}, shared by all ranks"
    save_record(record, job.out)


@dataclass
class Learnt:
    """What came of one training."""

    losses: list[float]  # of training, of each step, all ranks together
    held_out: list[float]  # bits per byte of text that was not trained on, after each piece
    decided: str = ""  # what ours said of its plan


def learn(job: Job, mesh: DeviceMesh, say: Progress) -> None:
    """Train by each method for as long as there is time; keep where it is, and write what was learnt so far."""
    begun, learnt = time.time(), dict[tuple[int, str], Learnt]()
    for seed in range(job.seeds):
        for method in job.methods:
            folder = Path(f"{job.out}.state") / f"seed-{seed}" / method.replace(" ", "-")
            for found in learning(job, method, seed, mesh, folder):
                learnt[seed, method] = found
                say(f"seed {seed}, {method}:", len(found.losses), mean(found.losses[-LAST:]), found.held_out)
                if dist.get_rank() == 0:
                    write_losses(job, learnt)
                if from_first(time.time() - begun > job.seconds):
                    say("time is over; call this again to go on")
                    return


def learning(job: Job, method: str, seed: int, mesh: DeviceMesh, folder: Path) -> Iterator[Learnt]:
    """Yield what was learnt: first in calls before, then after each piece."""
    folder.mkdir(parents=True, exist_ok=True)
    own, learnt = folder / f"rank-{dist.get_rank()}.pt", Learnt([], [])
    state = load(own, job.commit) if own.exists() else None
    if state is not None:
        learnt = Learnt(state["losses"], state["held_out"], state["decided"])
        yield learnt
        if len(learnt.losses) == job.steps:
            return
    model = sharded(job, method, mesh, folder / "plan.json", seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
    if state is not None:
        restore(state, model, optimizer, method)
    known, unseen = texts(job)
    for first in range(len(learnt.losses), job.steps, PIECE):
        found = []
        for step in range(first, min(first + PIECE, job.steps)):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, job.steps)
            words = batch_of(job.shape, known, dist.get_rank(), step, seed).to(job.device)
            found.append(one_step(model, optimizer, words))
        losses = torch.stack(found)
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        learnt.losses += losses.tolist()
        learnt.held_out.append(judged(job, model, unseen))
        learnt.decided = model.explain() if method in PLANNED else ""
        is_over = len(learnt.losses) == job.steps
        save(own, job.commit, learnt, {} if is_over else state_of(model, optimizer, method, folder))
        yield learnt


@torch.no_grad()
def judged(job: Job, model: Any, unseen: torch.Tensor) -> float:
    """Return the loss in bits per byte on sequences that lie evenly in a text, each rank its own, all together."""
    shape, ranks = job.shape, dist.get_world_size()
    starts = torch.linspace(0, len(unseen) - shape.tokens - 1, ranks * JUDGED).long().tolist()[dist.get_rank() :: ranks]
    parts = [
        sequences_at(starts[first : first + AT_A_TIME], unseen, shape.tokens) for first in range(0, JUDGED, AT_A_TIME)
    ]
    loss = torch.stack([loss_of(model, part.to(job.device)) for part in parts]).mean()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return float(loss) / log(2)


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate: 100 steps of rise, then a cosine down to a tenth."""
    return RATE * min(1.0, (step + 1) / 100) * (0.55 + 0.45 * cos(pi * step / steps))


def state_of(model: Any, optimizer: torch.optim.Optimizer, method: str, folder: Path) -> dict[str, Any]:
    """Return this rank's part of everything; the plan is written beside it."""
    state: dict[str, Any] = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    if method in PLANNED:
        state["exchange"] = model.exchange_state_dict()
        if dist.get_rank() == 0:
            save_plan(model.plan, folder / "plan.json")
    return state


def save(path: Path, commit: str, learnt: Learnt, state: dict[str, Any]) -> None:
    """Keep this rank's part of everything, once all ranks have written theirs."""
    part = path.with_suffix(".part")
    torch.save(local(asdict(learnt) | {"commit": commit} | state), part)
    dist.barrier()
    os.replace(part, path)


def load(path: Path, commit: str) -> dict[str, Any]:
    """Return what this rank has kept, if this commit kept it."""
    state: dict[str, Any] = torch.load(path, weights_only=False, map_location="cpu")
    if state["commit"] != commit:
        raise SystemExit(
            f"{path} was kept by commit {state['commit']}, this is {commit}; remove its folder, or go back"
        )
    return state


def restore(state: dict[str, Any], model: Any, optimizer: torch.optim.Optimizer, method: str) -> None:
    """Take this rank's part of everything back."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(state["model"][name])
    optimizer.load_state_dict(optimizer.state_dict() | {"param_groups": state["optimizer"]["param_groups"]})
    for parameter, kept in zip(model.parameters(), state["optimizer"]["state"].values(), strict=True):
        optimizer.state[parameter] = {
            name: like(parameter, value) if value.ndim else value.to(parameter.device) for name, value in kept.items()
        }
    if method in PLANNED:
        now = model.exchange_state_dict()
        for name, value in now.get("residual", {}).items():
            value.to_local().copy_(state["exchange"]["residual"][name])
        model.load_exchange_state_dict(now | {key: state["exchange"][key] for key in ("iterations", "scale")})


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


def write_losses(job: Job, learnt: dict[tuple[int, str], Learnt]) -> None:
    """Write the record of `loss`."""
    rows: dict[tuple[int, str], dict[str, Any]] = {
        (seed, method): {
            "method": method, "model": job.model, "seed": seed, "steps": len(found.losses),
            "held_out_bits_per_byte": [round(each, 5) for each in found.held_out], "held_out_every": PIECE,
            "last": mean(found.losses[-LAST:]), "losses": [round(each, 5) for each in found.losses],
        }
        for (seed, method), found in learnt.items()
    }  # fmt: skip
    rows |= {key: row for key, row in earlier_rows(job).items() if key not in rows or rows[key]["steps"] < row["steps"]}
    torchs, ours = compared_methods(job)
    ends: dict[str, list[float]] = {torchs: [], ours: []}  # by seed, of those that came to their end
    for (_, method), row in sorted(rows.items()):
        if method in ends and row["steps"] == job.steps:
            ends[method].append(row["held_out_bits_per_byte"][-1])
    claims, ratios = [], [one / other for one, other in zip(ends[ours], ends[torchs], strict=False)]
    if len(ends[ours]) == len(ends[torchs]) == job.seeds:
        what = f"held-out loss after {job.steps} steps, {ours} over {torchs}, {job.seeds} seeds"
        claims = [claim(what, mean(ends[ours]) / mean(ends[torchs]), 1.01, at_most=True)]
    decided = {f"{method}, seed {seed}": found.decided for (seed, method), found in learnt.items() if found.decided}
    write(job, [rows[key] for key in sorted(rows)], claims, ratios=ratios, decided=decided)


def compared_methods(job: Job) -> tuple[str, str]:
    """Return torch's own method, and the one of ours whose loss is compared with it."""
    return (SHARDS, ACROSS[2]) if job.across else (NATIVE, CODED)


def earlier_rows(job: Job) -> dict[tuple[int, str], dict[str, Any]]:
    """Return what torch's own learnt in an earlier record of the same job, by seed and method, with its source."""
    if not job.beside:
        return {}
    record = json.loads(Path(job.beside).read_text())
    here = asdict(replace(job, data=Path(job.data).name))
    for name in SAME:
        if record["job"][name] != here[name]:
            raise SystemExit(f"{job.beside} is of a job with {name}={record['job'][name]!r}; wanted {here[name]!r}")
    source, torchs = {"record": Path(job.beside).name, "commit": record["commit"]}, compared_methods(job)[0]
    return {
        (row["seed"], torchs): row | {"from": source}
        for row in record["rows"]
        if row["method"] == torchs and row["seed"] < job.seeds
    }


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

    mesh = init_device_mesh(job.device, (HOSTS, job.per_host), mesh_dim_names=NAMES)
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
    parser.add_argument("--across", action="store_true", help="shards lie on two hosts of one rank each")
    parser.add_argument("--model", choices=tuple(MODELS), help="default: gpt2 for time on cuda, else gpt-32m")
    parser.add_argument("--rate", help="of each host's NIC; default: 1gbit for time, none for loss")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=6, help="of each method in a round")
    parser.add_argument("--steps", type=int, default=1000, help="of loss")
    parser.add_argument("--seeds", type=int, default=1, help="of loss: weights and batches")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which no round, or step, is begun")
    parser.add_argument("--measure-seconds", type=float, default=10.0)
    parser.add_argument("--sequences", type=int, default=0, help="of each rank and iteration")
    parser.add_argument("--tokens", type=int, default=0, help="of each sequence")
    parser.add_argument("--data", type=Path, help="of loss: a folder with train.txt.xz and valid.txt.xz")
    parser.add_argument("--beside", type=Path, metavar="RECORD", help="of loss: an earlier record of the same job")
    parser.add_argument("--bf16", action="store_true", help="weights in bf16, sums in float32")
    parser.add_argument("--keep-weights", action="store_true", help="after forward: reshard_after_forward=False")
    parser.add_argument("--methods", type=lambda given: tuple(given.split(";")), help="rows, with ; between them")
    options = parser.parse_args()
    times = options.task == "time"
    known = ACROSS if options.across else METHODS
    methods = options.methods or (known if times else ACROSS[0:3:2] if options.across else (NATIVE, CODED))
    if unknown := [each for each in methods if each not in known]:
        parser.error(f"found {unknown[0]!r}; wanted any of {'; '.join(known)}")
    if options.across and options.device == "cuda":
        parser.error("--across is tried in host memory only")
    named = {str(options.out): "OUT.json", str(options.data): "FOLDER"}  # in the command that a record holds
    job = Job(
        options.task,
        str(options.out.resolve()),
        options.device,
        options.across,
        options.model or ("gpt2" if times and options.device == "cuda" else "gpt-32m"),
        options.rate or ("1gbit" if times else "none"),
        options.rounds,
        options.iterations,
        options.steps,
        options.seeds,
        options.seconds,
        options.bf16,
        options.keep_weights,
        options.measure_seconds,
        options.sequences,
        options.tokens,
        str(options.data.resolve()) if options.data else "",
        str(options.beside.resolve()) if options.beside else "",
        methods,
        shlex.join(["python", *(named.get(each, each) for each in sys.argv)]),
        make_record("", [])["commit"],
    )
    earlier_rows(job)  # which are refused now, and not after the first steps
    gpus = "shared" if job.device == "cuda" else "none"
    with emulated_cluster(HOSTS, job.rate, gpus=gpus) as cluster:
        if cluster.gpu is not None and cluster.gpu.complaint:
            print(cluster.gpu.complaint, file=sys.stderr)
        first = RankZero()
        command = [sys.executable, str(Path(__file__).resolve()), "rank", json.dumps(asdict(job))]
        outcome = cluster.run(command, per_host=job.per_host, sink=first)
        if outcome.exit_code:
            first.explain(outcome.failed_rank)
    sys.exit(outcome.exit_code)


if __name__ == "__main__":
    main()
