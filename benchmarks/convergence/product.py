"""Does training converge through the product? Real ranks on one device, the public wrapper, whole runs.

usage: product.py --suite gpt --data FOLDER --out RUNS.jsonl [--budget SECONDS] [--ranks 16] [--only NAME ...]

Every run is a `Job`: a task, an optimizer, what carries gradients, workers and a seed. A pool is as many processes as
a job has workers; it takes the next job that none has taken, until all are done or time is over. As many pools run side
by side as `--ranks` allows (on a GPU start CUDA's multi-process service first: `nvidia-cuda-mps-control -d`). Each
finished run is a line of the file, and such are not run again: interrupt and continue at will. Bytes are what
`bytes_sent()` counted on rank 0, over a dense ring's. `--steps`, `--batch` and `--workers` change all jobs, for trials.
"""

import argparse
import dataclasses
import json
import lzma
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from penstock.plan import Bucket, Plan
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch.optim import CompressedAdamW
from penstock.zoo.image_models import resnet20, vgg16_cifar
from penstock.zoo.language_models import GPT

TorchDDP = nn.parallel.DistributedDataParallel
BUCKET_NBYTES = 16 << 20  # of plans made here: nothing is measured, since results do not depend on it
# Seconds of a step, twenty ranks on one H200: what would not end in time is not begun, since a process that is killed
# takes the other clients of CUDA's multi-process service with it.
GUESS = {"resnet20": 0.04, "vgg16": 0.08, "lstm": 0.035, "gpt": 0.09, "gpt40m": 0.2}
MAX_BROKEN = 12  # pools that are started again after a job of theirs failed
STOCK, POWERSGD, ALONE, OURS = "stock", "powersgd", "alone", "ours"


@dataclass(frozen=True)
class Job:
    """One run."""

    name: str
    task: str = "gpt"
    workers: int = 4
    seed: int = 0
    carrier: str = OURS  # or torch's wrapper, torch's with its PowerSGD hook, or one process with the whole batch
    codec: str | None = None
    strategy: str = "parameter_server"
    dense_below: int = 0
    rank: int = 4  # of PowerSGD
    optimizer: str = "adamw"  # "compressed": CompressedAdamW; "sgd": with momentum 0.9
    warmup: float = 0.2  # of all steps, before momentum is exchanged
    warmup_codec: str | None = "blocks(bits=4)"
    max_norm: float | None = None
    clip: float = 1.0  # of the norm of what the optimizer is given; 0: not at all
    rate: float = 1e-3
    rises: int = 100  # steps in which the learning rate rises
    decay: float = 0.1  # of weights, matrices only
    steps: int = 1500
    batch: int = 64  # of all workers
    local_clip: float | None = None  # each rank clips its own gradient, by the wrapper's `clip=`
    density: float | None = None  # of a sparse codec, after a warm-up over a fifth of all steps
    begins: str = "gpt2"  # "zoo": as the zoo does; "torch": torch's own linear layers


# ---------------------------------------------------------------------------------------------------- suites


def gpt_suite() -> list[Job]:
    """Return runs of the GPT of 10.8M, the most telling first."""
    base = Job("dense", carrier=ALONE, workers=1)
    ours, momentum = Job(""), Job("", optimizer="compressed")
    blocks = replace(ours, name="blocks4", codec="blocks(bits=4)")
    onebit = replace(momentum, name="m onebit w20", codec="onebit(block=256)")
    two = replace(momentum, codec="blocks(bits=2,block=256)", warmup=0.07)
    return [
        base,
        replace(base, name="dense decay0.01 torch's weights", decay=0.01, begins="torch"),
        replace(base, name="dense no rise", rises=0),
        replace(base, name="dense no rise torch's weights", rises=0, begins="torch", decay=0.01),
        *(replace(base, seed=seed) for seed in (1, 2)),
        *(replace(blocks, seed=seed) for seed in (0, 1, 2)),
        *(replace(onebit, seed=seed) for seed in (0, 1, 2)),
        *(replace(blocks, workers=8, seed=seed) for seed in (0, 1, 2)),
        *(replace(onebit, workers=8, seed=seed) for seed in (0, 1, 2)),
        replace(ours, name="stock", carrier=STOCK),
        replace(ours, name="powersgd rank4", carrier=POWERSGD),
        replace(ours, name="powersgd rank16", carrier=POWERSGD, rank=16),
        replace(ours, name="powersgd rank32", carrier=POWERSGD, rank=32),
        replace(ours, name="terngrad", codec="terngrad(bitwidth=2)"),
        replace(ours, name="onebit", codec="onebit"),
        replace(ours, name="onebit blocks", codec="onebit(block=256)"),
        replace(ours, name="blocks2", codec="blocks(bits=2)"),
        replace(ours, name="blocks8", codec="blocks(bits=8)"),
        replace(ours, name="bf16", codec="bf16"),
        sparse(replace(ours, name="gtopk 0.01"), 0.01),
        replace(two, name="m blocks2 w7"),
        replace(onebit, name="m onebit w20 norm1", max_norm=1.0),
        replace(onebit, name="m onebit w20 norm2", max_norm=2.0),
        replace(onebit, name="m onebit w20 ring", strategy="ring"),
    ]


def large_suite() -> list[Job]:
    """Return runs of the GPT of 40M."""
    base = Job("", task="gpt40m", rate=6e-4, steps=600)
    return [
        replace(base, name="blocks4", codec="blocks(bits=4)"),
        replace(base, name="m onebit w20", codec="onebit(block=256)", optimizer="compressed"),
        replace(base, name="dense", carrier=ALONE, workers=1),
    ]


def sparse(job: Job, density: float) -> Job:
    """Return the job with gTop-k's exchange."""
    return replace(job, codec=f"sparse(density={density})", strategy="gtopk_doubling", density=density)


# Steps, batch of all workers, and by optimizer: rate, weights' decay, clipping; rates are dense's best of `tune`.
WIDE = {
    "resnet20": (1000, 128, {"adamw": (3e-3, 0.01, 1.0), "sgd": (0.1, 5e-4, 1.0)}),
    "vgg16": (1000, 128, {"adamw": (5e-4, 0.01, 1.0), "sgd": (0.05, 5e-4, 1.0)}),
    "lstm": (1000, 64, {"adamw": (5e-3, 0.01, 1.0), "sgd": (25.0, 0.0, 0.25)}),
}


def wide_job(task: str, optimizer: str) -> Job:
    """Return a job of another task than the GPT."""
    steps, batch, settings = WIDE[task]
    rate, decay, clip = settings[optimizer]
    return Job("", task=task, optimizer=optimizer, steps=steps, batch=batch, rate=rate, decay=decay, clip=clip)


def tune_suite() -> list[Job]:
    """Return dense runs of other tasks at several learning rates, on one process."""
    return [
        replace(job, name=f"tune {optimizer} x{factor}", carrier=ALONE, workers=1, rate=job.rate * factor)
        for factor in (1.0, 0.4, 2.5)
        for task in WIDE
        for optimizer in ("adamw", "sgd")
        for job in [wide_job(task, optimizer)]
    ]


def wide_suite() -> list[Job]:
    """Return the other tasks: dense, what `auto` may choose with each optimizer, and what others use.

    Dense is stock DDP where layers normalise by batch: one process would normalise over all workers' examples.
    """
    return [job for seed in (0, 1, 2) for task in WIDE for job in wide_jobs(task, seed)]


def wide_jobs(task: str, seed: int) -> list[Job]:
    """Return runs of one task and seed; what is not recommended from one seed only."""
    adam, sgd = (replace(wide_job(task, each), seed=seed) for each in ("adamw", "sgd"))
    alone = {"carrier": ALONE, "workers": 1} if task == "lstm" else {"carrier": STOCK}
    found = [
        replace(adam, name="dense", **alone),
        replace(adam, name="blocks4", codec="blocks(bits=4)"),
        replace(adam, name="m onebit w20", codec="onebit(block=256)", optimizer="compressed"),
        replace(sgd, name="sgd dense", **alone),
        replace(sgd, name="sgd onebit", codec="onebit"),
        replace(sgd, name="sgd terngrad", codec="terngrad(bitwidth=2)"),
        replace(sgd, name="sgd blocks4", codec="blocks(bits=4)"),
        sparse(replace(sgd, name="sgd gtopk 0.01"), 0.01),
    ]
    once = [
        replace(adam, name="powersgd rank4", carrier=POWERSGD),
        replace(sgd, name="sgd powersgd rank4", carrier=POWERSGD),
        replace(adam, name="terngrad", codec="terngrad(bitwidth=2)"),
        replace(adam, name="onebit", codec="onebit"),
    ]
    free = replace(sgd, clip=0.0, local_clip=sgd.clip if task == "lstm" else None)
    for codec in ("onebit", "terngrad(bitwidth=2)"):
        small = [replace(free, dense_below=65)] if task == "resnet20" else []
        once += [replace(each, name=f"sgd {codec.split('(')[0]}", codec=codec) for each in (free, *small)]
    if task != "lstm":
        once.append(replace(free, name="sgd dense", **alone))
    return found + once * (seed == 0)


def recommended_suite() -> list[Job]:
    """Return what we recommend on every task, the most telling first, and PowerSGD at about the same bytes."""
    blocks, power = Job("blocks4", codec="blocks(bits=4)"), Job("", carrier=POWERSGD)
    momentum = Job("m onebit w20", codec="onebit(block=256)", optimizer="compressed")
    wide = [replace(wide_job(task, "adamw"), name="blocks4", codec="blocks(bits=4)") for task in WIDE]
    return [
        *(replace(blocks, seed=seed) for seed in (0, 1, 2)),
        replace(power, name="powersgd rank32", rank=32),
        replace(power, name="powersgd rank16", rank=16),
        *wide,
        replace(blocks, workers=8),
        replace(momentum, seed=0),
        replace(blocks, workers=8, seed=1),
        *(replace(each, seed=1) for each in wide),
        replace(momentum, seed=1),
        replace(blocks, workers=8, seed=2),
        replace(momentum, seed=2),
        *(replace(each, name="dense", codec=None, carrier=STOCK, seed=2) for each in wide),
    ]


def smoke_suite() -> list[Job]:
    """Return short runs of a tiny GPT on one or two ranks, for machines without a GPU."""
    tiny = Job("", task="tiny", workers=2, steps=30, batch=4, rises=5)
    return [
        replace(tiny, name="dense", carrier=ALONE, workers=1),
        replace(tiny, name="stock", carrier=STOCK),
        replace(tiny, name="blocks4", codec="blocks(bits=4)"),
        replace(tiny, name="m onebit", codec="onebit(block=256)", optimizer="compressed"),
    ]


# Ranks at which ACP-SGD, and PowerSGD in two rounds, send about 0.13 and 0.06 of the bytes.
LOW_RANKS = {"tiny": ((11, 4), (5, 2)), "small": ((23, 10), (12, 5))}


def low_rank_suite() -> list[Job]:
    """Return low-rank factors beside codecs of as many bytes, on GPTs that need no GPU.

    torch's PowerSGD does not run over gloo; with two rounds ours is the same algorithm.
    """
    return [replace(job, seed=seed) for task in LOW_RANKS for seed in (0, 1) for job in low_rank_jobs(task)]


def low_rank_jobs(task: str) -> list[Job]:
    """Return the runs of one GPT."""
    base = Job("", task=task, steps=300, batch=16, rises=30, rate=2e-3)
    thin, (acp, power) = replace(base, strategy="native"), LOW_RANKS[task]
    return [
        replace(base, name="dense", carrier=ALONE, workers=1),
        *(replace(thin, name=f"acp rank{rank}", codec=f"lowrank(rank={rank})") for rank in acp),
        *(replace(thin, name=f"powersgd rank{rank}", codec=f"lowrank(rank={rank}, rounds=2)") for rank in power),
        replace(base, name="blocks4", codec="blocks(bits=4)"),
        replace(base, name="m onebit w20", codec="onebit(block=256)", optimizer="compressed"),
    ]


SUITES: dict[str, Callable[[], list[Job]]] = {
    "gpt": gpt_suite,
    "large": large_suite,
    "tune": tune_suite,
    "wide": wide_suite,
    "lowrank": low_rank_suite,
    "recommended": recommended_suite,
    "smoke": smoke_suite,
}


# ---------------------------------------------------------------------------------------------------- tasks


class Text:
    """Bytes of WikiText-2; judged by bits per byte of the held-out text."""

    low = True  # bf16 autocast; the others TF32

    def __init__(self, data: Path, device: torch.device, width: int, depth: int, heads: int, context: int) -> None:
        self._shape, self._context, self._device = (width, depth, heads), context, device
        self._text = {name: self._read(data / "wikitext-2" / f"{name}.txt.xz") for name in ("train", "valid")}

    def _read(self, path: Path) -> torch.Tensor:
        return torch.frombuffer(bytearray(lzma.decompress(path.read_bytes())), dtype=torch.uint8).to(self._device)

    def network(self, job: Job) -> nn.Module:
        """Return the network as it begins."""
        width, depth, heads = self._shape
        found = GPT(256, self._context, width=width, depth=depth, heads=heads, dropout=0.0)
        for name, parameter in found.named_parameters():
            if job.begins == "gpt2" and name.endswith("c_proj.weight"):
                parameter.data.div_(math.sqrt(2 * depth))
            if job.begins == "torch" and ".h." in name and parameter.dim() > 1:  # stored inputs x outputs
                nn.init.uniform_(parameter, -(parameter.shape[0] ** -0.5), parameter.shape[0] ** -0.5)
        return found

    def picks(self, job: Job) -> torch.Tensor:
        """Return which examples each step takes, for all workers."""
        generator = torch.Generator().manual_seed(1000 + job.seed)
        return torch.randint(
            len(self._text["train"]) - self._context - 1, (job.steps, job.batch), generator=generator
        ).to(self._device)

    def batch(self, picked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return examples and what is wanted for them."""
        words = self._text["train"][picked[:, None] + torch.arange(self._context + 1, device=self._device)].long()
        return words[:, :-1].contiguous(), words[:, 1:]

    def judge(self, model: nn.Module, low: Callable[[], Any]) -> float:
        """Return how good the network is, on one process."""
        text = self._text["valid"] if self._context > 64 else self._text["valid"][:20_001]
        count = (len(text) - 1) // self._context * self._context
        inputs, targets = (
            text[:count].view(-1, self._context).long(),
            text[1 : count + 1].view(-1, self._context).long(),
        )
        total = 0.0
        for x, y in zip(inputs.split(256), targets.split(256), strict=True):
            with low():
                logits = model(x)
            total += float(functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum"))
        return total / count / math.log(2)


class Images:
    """A fifth of CIFAR-10, shifted and mirrored; judged by errors on test images, in percent."""

    low = False

    def __init__(self, data: Path, device: torch.device, make: Callable[[], nn.Module]) -> None:
        self._make, self._device = make, device
        self._train, self._test = (self._read(data / "cifar10", name) for name in ("data_batch_1", "test_batch"))

    def _read(self, folder: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        with lzma.open(folder / f"{name}.images.npy.xz") as file:
            images = torch.from_numpy(np.load(file)).permute(0, 3, 1, 2).float().div_(255)
        mean, spread = torch.tensor([0.491, 0.482, 0.447]), torch.tensor([0.247, 0.243, 0.262])
        normal = ((images - mean.view(3, 1, 1)) / spread.view(3, 1, 1)).contiguous()
        labels = torch.from_numpy(np.load(folder / f"{name}.labels.npy")).long()
        return normal.to(self._device), labels.to(self._device)

    def network(self, job: Job) -> nn.Module:
        """Return the network as it begins."""
        return self._make()

    def picks(self, job: Job) -> torch.Tensor:
        """Return of each picture its number, how far it is shifted down and right, and whether it is mirrored."""
        generator = torch.Generator().manual_seed(1000 + job.seed)
        sizes = (len(self._train[0]), 9, 9, 2)
        drawn = [torch.randint(size, (job.steps, job.batch), generator=generator) for size in sizes]
        return torch.stack(drawn, -1).to(self._device)

    def batch(self, picked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return examples and what is wanted for them."""
        which, down, right, mirrored = picked.unbind(-1)
        padded = functional.pad(self._train[0][which], (4, 4, 4, 4))
        reach = torch.arange(32, device=self._device)
        columns = torch.where(mirrored[:, None] == 1, 31 - reach, reach) + right[:, None]
        rows = reach + down[:, None]
        at = torch.arange(len(which), device=self._device)[:, None, None, None]
        channels = torch.arange(3, device=self._device)[:, None, None]
        return padded[at, channels, rows[:, None, :, None], columns[:, None, None, :]], self._train[1][which]

    def judge(self, model: nn.Module, low: Callable[[], Any]) -> float:
        """Return how good the network is, on one process."""
        wrong = 0
        for images, labels in zip(*(each.split(1000) for each in self._test), strict=True):
            with low():
                wrong += int((model(images).argmax(1) != labels).sum())
        return 100 * wrong / len(self._test[1])


class Words:
    """Penn Treebank by an LSTM that begins anew with every window; judged by the perplexity of held-out words."""

    low = False
    WINDOW = 35

    def __init__(self, data: Path, device: torch.device) -> None:
        texts = {name: (data / "ptb" / f"ptb.{name}.txt").read_text() for name in ("train", "valid")}
        words = {name: text.replace("\n", " <eos> ").split() for name, text in texts.items()}
        numbers = {word: index for index, word in enumerate(dict.fromkeys(words["train"]))}
        self._count, self._device = len(numbers), device
        self._text = {n: torch.tensor([numbers[w] for w in each if w in numbers]) for n, each in words.items()}
        self._text = {name: each.to(device) for name, each in self._text.items()}

    def network(self, job: Job) -> nn.Module:
        """Return the network as it begins."""
        return LSTM(self._count, 400)

    def picks(self, job: Job) -> torch.Tensor:
        """Return which examples each step takes, for all workers."""
        generator = torch.Generator().manual_seed(1000 + job.seed)
        last = len(self._text["train"]) - self.WINDOW - 1
        return torch.randint(last, (job.steps, job.batch), generator=generator).to(self._device)

    def batch(self, picked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return examples and what is wanted for them."""
        words = self._text["train"][picked[:, None] + torch.arange(self.WINDOW + 1, device=self._device)]
        return words[:, :-1].contiguous(), words[:, 1:]

    def judge(self, model: nn.Module, low: Callable[[], Any]) -> float:
        """Return how good the network is, on one process."""
        text = self._text["valid"]
        count = (len(text) - 1) // self.WINDOW * self.WINDOW
        inputs, targets = text[:count].view(-1, self.WINDOW), text[1 : count + 1].view(-1, self.WINDOW)
        total = 0.0
        for x, y in zip(inputs.split(256), targets.split(256), strict=True):
            with low():
                logits = model(x)
            total += float(functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum"))
        return math.exp(total / count)


class LSTM(nn.Module):
    """A table of words, two layers, and the table again."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(words, width), nn.LSTM(width, width, 2, batch_first=True)
        self.drop, self.bias = nn.Dropout(0.2), nn.Parameter(torch.zeros(words))
        nn.init.uniform_(self.table.weight, -0.1, 0.1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return one logit per word of the vocabulary and position."""
        hidden = self.drop(self.layers(self.drop(self.table(words)))[0])
        return functional.linear(hidden, self.table.weight, self.bias)


TASKS: dict[str, Callable[[Path, torch.device], Any]] = {
    "gpt": lambda data, device: Text(data, device, width=384, depth=6, heads=6, context=256),
    "gpt40m": lambda data, device: Text(data, device, width=512, depth=12, heads=8, context=256),
    "small": lambda data, device: Text(data, device, width=128, depth=4, heads=4, context=64),
    "tiny": lambda data, device: Text(data, device, width=64, depth=2, heads=2, context=32),
    "resnet20": lambda data, device: Images(data, device, resnet20().build),
    "vgg16": lambda data, device: Images(data, device, vgg16_cifar().build),
    "lstm": Words,
}


# ---------------------------------------------------------------------------------------------------- one run


def wrapped(job: Job, network: nn.Module, nccl: Any) -> nn.Module:
    """Return the network in what carries its gradients."""
    if job.carrier == ALONE:
        return network
    if job.carrier == OURS:
        plan = hand_plan(job, network)
        if job.density is not None:
            stages = {"warmup": [0.25, 0.0625, 0.03, 0.015], "warmup_every": max(1, job.steps // 20)}
            return OurDDP(network, codec="gtopk", density=job.density, dense_below=job.dense_below, plan=plan, **stages)
        options = {"dense_below": job.dense_below, "strategy": job.strategy, "clip": job.local_clip}
        return OurDDP(network, codec=job.codec, plan=plan, **options)
    found = TorchDDP(network, process_group=nccl, gradient_as_bucket_view=True)
    if job.carrier == POWERSGD:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

        state = power.PowerSGDState(nccl, matrix_approximation_rank=job.rank, start_powerSGD_iter=10)
        found.register_comm_hook(state, power.powerSGD_hook)
    return found


def hand_plan(job: Job, network: nn.Module) -> Plan:
    """Return buckets of some megabytes, the last registered first, all by one route."""
    buckets: list[list[tuple[str, int]]] = [[]]
    for name, parameter in reversed(list(network.named_parameters())):
        if sum(nbytes for _, nbytes in buckets[-1]) >= BUCKET_NBYTES:
            buckets.append([])
        buckets[-1].append((name, parameter.numel() * parameter.element_size()))
    route = (job.strategy, job.codec)
    found = tuple(Bucket(tuple(n for n, _ in each), sum(size for _, size in each), *route) for each in buckets)
    return Plan(job.task, job.workers, "hand", found)


def optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """Return the job's optimizer; weights of matrices decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": job.decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if job.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=job.rate, momentum=0.0 if job.task == "lstm" else 0.9)
    if job.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=job.rate, betas=(0.9, 0.95))
    assert isinstance(model, OurDDP)
    return CompressedAdamW(
        groups, lr=job.rate, betas=(0.9, 0.95), ddp=model, warmup_steps=round(job.warmup * job.steps),
        warmup_codec=job.warmup_codec, max_norm=job.max_norm,
    )  # fmt: skip


def run(job: Job, task: Any, device: torch.device, nccl: Any) -> dict[str, Any]:
    """Train once; return what came of it."""
    begun = time.perf_counter()
    rank = dist.get_rank() if job.carrier != ALONE else 0
    cuda = device.type == "cuda"
    low = partial(torch.autocast, "cuda", torch.bfloat16, cache_enabled=False) if cuda and task.low else nullcontext
    torch.manual_seed(job.seed)
    network = task.network(job).to(device)
    numel = sum(p.numel() for p in network.parameters())
    share = job.batch // job.workers
    picks = task.picks(job)[:, rank * share : (rank + 1) * share]
    if cuda:
        capture(network, task.batch(picks[0])[0], low)
    model = wrapped(job, network, nccl)
    optimizer = optimizer_of(job, model)
    torch.manual_seed(1000 * job.seed + rank)  # of dropout
    losses, norms = torch.zeros(job.steps, device=device), torch.zeros(job.steps, device=device)
    for step in range(job.steps):
        for group in optimizer.param_groups:
            rises = min(1.0, (step + 1) / job.rises) if job.rises else 1.0
            group["lr"] = job.rate * rises * 0.5 * (1 + math.cos(math.pi * step / job.steps))
        examples, wanted = task.batch(picks[step])
        with low():
            logits = model(examples)
        loss = functional.cross_entropy(logits.flatten(0, -2).float(), wanted.flatten())
        loss.backward()
        losses[step] = loss.detach()
        if job.clip:
            norms[step] = nn.utils.clip_grad_norm_(model.parameters(), job.clip).detach()
        optimizer.step()
        optimizer.zero_grad()
    trained = time.perf_counter() - begun
    network.eval()
    with torch.no_grad():
        judged = task.judge(network, low) if rank == 0 else math.nan
    traffic = model.bytes_sent() if isinstance(model, OurDDP) else None
    return {
        **asdict(job),
        "held_out": round(judged, 5),
        "bytes_over_dense": round(traffic.sent_nbytes / traffic.dense_nbytes, 5) if traffic else bytes_of(job, network),
        "seconds": round(trained, 2),
        "parameters": numel,
        "losses": [round(float(each.mean()), 4) for each in losses.cpu().chunk(15)],
        "norms": [round(float(each.mean()), 4) for each in norms.cpu().chunk(15)],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def capture(network: nn.Module, examples: torch.Tensor, low: Callable[[], Any]) -> None:
    """Make the network's passes CUDA graphs: many processes that launch small kernels hold each other up.

    All gradients are ready at once then, which changes when they travel and not what arrives.
    """
    before = [each.clone() for each in network.buffers()]  # of normalisation: trial passes count into them
    with low():
        torch.cuda.make_graphed_callables(network, (examples,))
    for buffer, value in zip(network.buffers(), before, strict=True):
        buffer.copy_(value)


def bytes_of(job: Job, network: nn.Module) -> float:
    """Return what torch's carriers send over dense: PowerSGD its factors and what has one dimension."""
    if job.carrier != POWERSGD:
        return 1.0
    sent = total = 0
    for each in network.parameters():
        rows, total = each.shape[0], total + each.numel()
        columns = each.numel() // max(rows, 1)
        factors = job.rank * (rows + columns)
        sent += factors if each.dim() > 1 and 2 * factors < each.numel() else each.numel()
    return round(sent / total, 5)


# ---------------------------------------------------------------------------------------------------- pools


def work(options: argparse.Namespace) -> int:
    """Train all jobs that this pool was given; one process of it."""
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    dist.init_process_group("gloo")
    nccl = dist.new_group(backend="nccl") if cuda and workers > 1 and not options.gloo else None
    tasks: dict[str, Any] = {}
    longest: dict[tuple[str, int], float] = {}
    for index, text in enumerate(json.loads(options.jobs)):
        job = Job(**text)
        kind = (job.task, job.steps)
        late = time.time() + 1.1 * longest.get(kind, GUESS.get(job.task, 0.0) * job.steps) > options.ends
        mine = [rank == 0 and not late and claim(options.out, workers, index)]
        dist.broadcast_object_list(mine, 0)
        if not mine[0]:
            continue
        begun = time.time()
        try:
            if job.task not in tasks:
                tasks[job.task] = TASKS[job.task](Path(options.data), device)
            found = run(job, tasks[job.task], device, nccl)
        except Exception as error:
            if rank == 0:
                last = traceback.format_exc().strip().splitlines()[-6:]
                keep(options.out, {**asdict(job), "error": f"{type(error).__name__}: {error}"[:600], "trace": last})
            traceback.print_exc()
            os._exit(1)
        if rank == 0:
            keep(options.out, found)
        longest[kind] = max(longest.get(kind, 0.0), time.time() - begun)
        if cuda:
            torch.cuda.empty_cache()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of senders and of NCCL need no farewell


def claim(path: str, workers: int, index: int) -> bool:
    """Take a job, unless another pool has it."""
    try:
        with open(f"{claims_of(path)}/{workers}-{index}", "x"):
            return True
    except FileExistsError:
        return False


def claims_of(path: str) -> str:
    """Return the folder in which pools mark jobs that they took."""
    return f"{path}.claims"


def keep(path: str, found: dict[str, Any]) -> None:
    """Add a line to the file, whole: several pools write."""
    with open(path, "a") as file:
        file.write(json.dumps(found) + "\n")
    shown = ("name", "task", "workers", "seed", "held_out", "bytes_over_dense", "seconds", "error")
    print(json.dumps({name: found[name] for name in shown if name in found}), flush=True)


def lines(path: str) -> list[dict[str, Any]]:
    """Return what was kept."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []


def key(document: dict[str, Any]) -> str:
    """Return what tells runs apart."""
    values = {each.name: document.get(each.name, each.default) for each in dataclasses.fields(Job)}
    return json.dumps(values, sort_keys=True)


def start(options: argparse.Namespace, workers: int, jobs: list[Job]) -> list["subprocess.Popen[bytes]"]:
    """Start a pool."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--worker", "--data", options.data, "--out", options.out, "--ends", str(options.ends)]
    words += ["--jobs", json.dumps([asdict(job) for job in jobs])] + ["--gloo"] * options.gloo
    started = []
    for rank in range(workers):
        own = {"RANK": str(rank), "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        nccl = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        env = {**os.environ, **own, **nccl, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), *words], env=env))
    return started


def pools(jobs: list[Job], ranks: int) -> list[list[Job]]:
    """Return the jobs of each pool: all of one number of workers, of which a pool takes what others left."""
    dealt: list[list[Job]] = []
    sizes = sorted({job.workers for job in jobs})
    for workers in sizes:
        mine = [job for job in jobs if job.workers == workers]
        room = ranks if sizes == [workers] else 3 if workers == 1 else ranks - 3 * (1 in sizes)
        dealt += [mine] * min(len(mine), max(1, room // workers))
    return dealt


def lead(options: argparse.Namespace) -> int:
    """Keep pools going until all jobs are done or time is over."""
    options.ends = time.time() + options.budget
    done = {key(line) for line in lines(options.out) if "error" not in line}
    shutil.rmtree(claims_of(options.out), ignore_errors=True)
    os.makedirs(claims_of(options.out))
    changed = {name: getattr(options, name) for name in ("steps", "batch") if getattr(options, name)}
    suite = [replace(job, **changed) for job in SUITES[options.suite]()]
    suite = [replace(job, workers=options.workers) if options.workers and job.workers > 1 else job for job in suite]
    wanted = [job for job in suite if not options.only or job.name in options.only]
    wanted = [job for job in wanted if job.task in (options.tasks or [job.task])]
    todo = [job for job in wanted if key(asdict(job)) not in done and job.seed in (options.seeds or [job.seed])]
    waiting = pools(todo, options.ranks)
    print(f"{len(todo)} runs in {len(waiting)} pools; {len(done)} are done", flush=True)
    running: list[tuple[list[Job], list[subprocess.Popen[bytes]]]] = []
    broken = 0
    for _ in range(int(options.budget) * 2 + 120):
        in_flight = sum(len(processes) for _, processes in running)
        while waiting and in_flight + waiting[0][0].workers <= options.ranks + 4:
            mine = waiting.pop(0)
            running.append((mine, start(options, mine[0].workers, mine)))
            in_flight += mine[0].workers
        for mine, processes in list(running):
            codes = [process.poll() for process in processes]
            if all(code == 0 for code in codes) or any(codes):
                running.remove((mine, processes))
                end(processes)
                broken += any(codes)
                if any(codes) and broken < MAX_BROKEN and time.time() < options.ends:
                    waiting.append(mine)
        if (not running and not waiting) or time.time() > options.ends + 25:
            break
        time.sleep(0.5)
    for _, processes in running:
        end(processes)
    return 0


def end(processes: list["subprocess.Popen[bytes]"]) -> None:
    """End what is left of a pool."""
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def main() -> int:
    """Lead the study, or work for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", default="gpt", choices=sorted(SUITES))
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--budget", type=float, default=400.0)
    parser.add_argument("--ranks", type=int, default=16, help="processes side by side")
    parser.add_argument("--only", nargs="*", default=[], help="names of jobs")
    parser.add_argument("--tasks", nargs="*", default=[], choices=sorted(TASKS))
    parser.add_argument("--seeds", nargs="*", default=[], type=int)
    for name in ("--steps", "--batch", "--workers"):
        parser.add_argument(name, type=int, default=0)
    parser.add_argument("--gloo", action="store_true", help="torch's wrapper over gloo too: no NCCL")
    for name in ("--worker",):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", default="[]", help=argparse.SUPPRESS)
    parser.add_argument("--ends", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    return work(options) if options.worker else lead(options)


if __name__ == "__main__":
    sys.exit(main())
