"""Trains by every method and keeps the curves: `python benchmarks/convergence/run.py resnet20 --data D --out F.json`.

Needs PyTorch, Triton and a GPU. All methods and seeds train together; D has the folders `cifar10` and `ptb`.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.bench.claim import claim_documents
from penstock.bench.convergence.claims import claims
from penstock.bench.convergence.method import parse_method
from penstock.bench.convergence.registry import make_task
from penstock.bench.convergence.study import seconds_per_step, train
from penstock.bench.convergence.summary import against_dense
from penstock.bench.convergence.tasks import Recipe
from penstock.bench.convergence.training import Fleet
from penstock.bench.record import make_record, save_record

METHODS = (
    "dense gtopk:0.001 gtopk:0.005 gtopk-published:0.001 gtopk-published:0.005 topk:0.001 topk:0.005 "
    "onebit terngrad dgc:0.01"
)
_SHARES = ("rising", "warmup")  # of the recipe: steps, or, below 1, a share of all steps
_CHANGES = ("steps", "clip", *_SHARES)


def main() -> int:
    """Run the study and print what each method ends with."""
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    task = make_task(options.task, Path(options.data), device, getattr(torch, options.values))
    task = replace(task, global_batch=options.global_batch or task.global_batch)
    changed = {name: getattr(options, name) for name in _CHANGES if getattr(options, name) is not None}
    methods = [parse_method(_with(text, options.all)) for text in options.methods.split()]
    seeds, workers = (tuple(int(text) for text in each.split(",")) for each in (options.seeds, options.workers))
    rates = _rates(options.learning_rate or str(task.recipe.learning_rate), len(workers))

    def fleets(steps: int) -> list[Fleet]:
        recipe = _in_steps(replace(task.recipe, **changed), steps)
        return [
            Fleet(task, replace(recipe, learning_rate=rate), methods, seeds, each, device)
            for each, rate in zip(workers, rates, strict=True)
        ]

    steps = options.steps or task.recipe.steps
    if options.budget:
        each = seconds_per_step(fleets(200))
        steps = min(steps, int(options.budget / each))
        print(f"{task.name}: {1000 * each:.2f} ms a step, so {steps} steps", flush=True)

    def keep(rows: Sequence[dict[str, Any]]) -> None:
        found = [row | {"values": options.values} for row in rows]
        asked = claim_documents(claims(found))
        save_record(make_record("convergence", found, device=_device(device), claims=asked), options.out)

    rows = train(fleets(steps), options.judged, options.seconds, lambda text: print(text, flush=True), keep)
    keep(rows)
    for line in against_dense(rows):
        worse = f"{100 * line['worse_than_dense']:.2f}% worse" if "worse_than_dense" in line else ""
        print(f"{line['workers']} workers, {line['method']:36} {line.get('final', math.nan):.4f} {worse}")
    return 0


def _with(method: str, options: str) -> str:
    return method if method.startswith("dense") else method + options


def _rates(text: str, fleets: int) -> list[float]:
    """Return a learning rate for each number of workers; one stands for all."""
    rates = [float(each) for each in text.split(",")]
    return rates * fleets if len(rates) == 1 else rates


def _in_steps(recipe: Recipe, steps: int) -> Recipe:
    """Return a recipe of so many steps, shares of them made numbers."""
    shares = {name: getattr(recipe, name) for name in _SHARES}
    return replace(
        recipe, steps=steps, **{n: max(1, round(v * steps)) if v < 1 else round(v) for n, v in shares.items()}
    )


def _device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--all", default="", help="options that all methods but dense get, such as :dense_below=65")
    parser.add_argument("--values", default="float32", help="type of values in the network: float32 (TF32) or bfloat16")
    parser.add_argument("--workers", default="4,8")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--global-batch", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--learning-rate", help="one, or one for each number of workers: 4,8")
    parser.add_argument("--rising", type=float)
    parser.add_argument("--warmup", type=float)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--budget", type=float, default=0.0, help="seconds; fewer steps where all would take longer")
    parser.add_argument("--judged", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
