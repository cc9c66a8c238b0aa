r"""How many seconds until dense training's final loss? Stock DDP, its hooks and ours, on slow links.

    penstock cluster run --hosts 4 --rate 1gbit --rank0 -- \
        python benchmarks/convergence/time_to_loss.py --task cpu --data FOLDER --out OUT.json --rate 1gbit

Every rank runs this, on emulated hosts; with a GPU also `--gpus shared`. Methods train one after the other, from the
same weights on the same examples: a GPT of bytes with AdamW, clipped and with a cosine schedule. The clock runs while
training does, start-up and measuring included; it stands while rank 0 judges held-out text. The time to a loss is where
the straight line between two judgements crosses it. The loss wanted is what stock DDP ends with, and 1% above it.

Records: `results/*/time-to-loss-*.json`.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from product import Job, Text
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch.optim import CompressedAdamW

SIZES = {  # width, depth, heads, context; examples of all workers in a step; learning rate
    "small": (128, 4, 4, 64, 32, 2e-3),  # 0.9M parameters: two cores train it in minutes
    "cpu": (256, 4, 4, 64, 8, 2e-3),  # 3.3M: on two cores, computing takes about as long as sending at 1 Gb/s
    "gpt": (384, 6, 6, 256, 64, 1e-3),  # 10.8M, issue 25's
}
BETAS, CLIP, DECAY = (0.9, 0.95), 1.0, 0.1
JUDGED_BYTES = 65_536  # of held-out text, at each judgement
WARMUP = 0.2  # of all steps, before CompressedAdamW sends momentum


@dataclass(slots=True)
class Clock:
    """Seconds of training, without those of judging."""

    seconds: float = 0.0
    _begun: float = field(default_factory=time.perf_counter)

    def read(self) -> float:
        """Return the seconds so far."""
        return self.seconds + time.perf_counter() - self._begun

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Stop the clock on every rank until all have come back."""
        self.seconds = self.read()
        yield
        dist.barrier()
        self._begun = time.perf_counter()


def stock(model: nn.Module, parameters: Any, steps: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return torch's wrapper, and AdamW."""
    return TorchDDP(model, gradient_as_bucket_view=True), torch.optim.AdamW(parameters, lr=rate, betas=BETAS)


def fp16(model: nn.Module, parameters: Any, steps: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return torch's wrapper with its hook for 16 bits."""
    wrapped, optimizer = stock(model, parameters, steps, rate)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)  # type: ignore[operator]
    return wrapped, optimizer


def power(model: nn.Module, parameters: Any, steps: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return torch's wrapper with its PowerSGD hook, rank 4."""
    wrapped, optimizer = stock(model, parameters, steps, rate)
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
    wrapped.register_comm_hook(state, powersgd.powerSGD_hook)  # type: ignore[operator]
    return wrapped, optimizer


def auto(model: nn.Module, parameters: Any, steps: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return our wrapper as it decides by itself."""
    return OurDDP(model, codec="auto"), torch.optim.AdamW(parameters, lr=rate, betas=BETAS)


def blocks(model: nn.Module, parameters: Any, steps: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return our wrapper with gradients of 4 bits."""
    return OurDDP(model, codec="blocks(bits=4)"), torch.optim.AdamW(parameters, lr=rate, betas=BETAS)


def compressed(model: nn.Module, parameters: Any, steps: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return our wrapper with an optimizer that sends momentum of 1 bit."""
    wrapped = OurDDP(model, codec="onebit(block=256)")
    warmup = round(WARMUP * steps)
    return wrapped, CompressedAdamW(parameters, lr=rate, betas=BETAS, ddp=wrapped, warmup_steps=warmup)


METHODS: dict[str, Callable[..., tuple[nn.Module, torch.optim.Optimizer]]] = {
    "stock DDP": stock,
    "fp16 hook": fp16,
    "PowerSGD rank 4": power,
    "ours: auto": auto,
    "ours: blocks(bits=4)": blocks,
    "ours: CompressedAdamW": compressed,
}


def train(method: str, options: argparse.Namespace, task: Text, device: torch.device) -> dict[str, Any]:
    """Train once; return held-out bits per byte against seconds."""
    batch, rate = SIZES[options.task][4:]
    job = Job(method, workers=dist.get_world_size(), seed=options.seed, steps=options.steps, batch=batch)
    low = (lambda: torch.autocast("cuda", torch.bfloat16)) if device.type == "cuda" else nullcontext
    torch.manual_seed(options.seed)
    network = task.network(job).to(device)
    groups = [
        {"params": [p for p in network.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in network.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    share = batch // job.workers
    picks = task.picks(job)[:, dist.get_rank() * share :][:, :share]
    dist.barrier()
    clock, curve = Clock(), []
    model, optimizer = METHODS[method](network, groups, options.steps, rate)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            rises = min(1.0, (step + 1) / max(1, options.steps // 15))
            group["lr"] = rate * rises * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        with low():
            inputs, wanted = task.batch(picks[step])
            loss = functional.cross_entropy(model(inputs).flatten(0, 1).float(), wanted.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            if device.type == "cuda":
                torch.cuda.synchronize()
            with clock.standing():
                curve.append((step + 1, round(clock.seconds, 3), judge(task, network, low)))
                say(f"{method:>24} step {step + 1:5} {clock.seconds:8.1f} s  {curve[-1][2]:.4f} bits per byte")
    sent = model.bytes_sent() if isinstance(model, OurDDP) else None
    plan = model.plan if isinstance(model, OurDDP) else None
    found = {
        "method": method,
        "curve": curve,  # step, seconds, held-out bits per byte
        "bytes_over_dense": round(sent.sent_nbytes / sent.dense_nbytes, 4) if sent else None,
        "codecs": sorted({str(bucket.codec) for bucket in plan.buckets}) if plan else None,
        "weights_equal": weights_equal(network),
    }
    del model, optimizer
    return found


@torch.no_grad()
def judge(task: Text, network: nn.Module, low: Callable[[], Any]) -> float:
    """Return bits per byte of the first of the held-out text, on rank 0."""
    if dist.get_rank() != 0:
        return math.nan
    network.eval()
    found = task.judge(network, low)
    network.train()
    return float(round(found, 5))


def weights_equal(network: nn.Module) -> bool:
    """Whether all ranks ended with the same weights."""
    sums = [None] * dist.get_world_size()
    dist.all_gather_object(sums, [float(each.detach().double().sum()) for each in network.parameters()])
    return all(each == sums[0] for each in sums)


def seconds_to(curve: list[tuple[int, float, float]], wanted: float) -> float | None:
    """Return when a curve first reaches a loss, on the line between judgements; None where it does not."""
    before = None
    for _, seconds, loss in curve:
        if loss <= wanted:
            if before is None:
                return seconds
            part = (before[1] - wanted) / (before[1] - loss)
            return round(before[0] + part * (seconds - before[0]), 2)
        before = seconds, loss
    return None


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with seconds to stock's final loss and to 1% above it, and how much faster than stock that is."""
    final = next(row["curve"][-1][2] for row in rows if row["method"] == "stock DDP")
    stock_seconds = next(seconds_to(row["curve"], 1.01 * final) for row in rows if row["method"] == "stock DDP")
    for row in rows:
        within = seconds_to(row["curve"], 1.01 * final)
        row["final"], row["seconds"] = row["curve"][-1][2], row["curve"][-1][1]
        row["seconds_to_final"], row["seconds_to_within_1_percent"] = seconds_to(row["curve"], final), within
        row["times_stock"] = round(stock_seconds / within, 2) if within and stock_seconds else None
    return rows


def save(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write what is there so far, on rank 0."""
    if dist.get_rank() == 0:
        document = {
            "format": "penstock-bench/1",
            "benchmark": "time-to-loss",
            "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            "commit": options.commit,
            "machine": options.machine,
            "torch": torch.__version__,
            "hosts": dist.get_world_size(),
            "rate": options.rate,
            "task": options.task,
            "steps": options.steps,
            "seed": options.seed,
            "rows": summary(rows) if rows and rows[0]["method"] == "stock DDP" else rows,
        }
        Path(options.out).write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Train with each method; write OUT.json after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="small", choices=sorted(SIZES))
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--rate", required=True, help="of the links, for the record")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps between judgements")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which no method begins")
    parser.add_argument("--methods", nargs="*", default=[], choices=list(METHODS), help="all, where none is named")
    parser.add_argument("--commit", default="")
    parser.add_argument("--machine", default="")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if not cuda:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    width, depth, heads, context = SIZES[options.task][:4]
    task = Text(Path(options.data), device, width=width, depth=depth, heads=heads, context=context)
    task._text["valid"] = task._text["valid"][: JUDGED_BYTES + 1]
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    over_gloo = [method for method in METHODS if METHODS[method] is not power]  # torch's hook dies over gloo
    for method in options.methods or (list(METHODS) if cuda else over_gloo):
        go = [time.perf_counter() - begun < options.budget]
        dist.broadcast_object_list(go, 0)
        if not go[0]:
            break
        rows.append(train(method, options, task, device))
        save(options, rows)
    for row in rows if dist.get_rank() == 0 else []:
        print({key: value for key, value in row.items() if key != "curve"}, flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of senders and of NCCL need no farewell


if __name__ == "__main__":
    sys.exit(main())
