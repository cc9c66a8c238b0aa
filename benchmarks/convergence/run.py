"""Trains by every method and keeps the curves: `python benchmarks/convergence/run.py resnet20 --data D --out F.json`.

Needs PyTorch, Triton and a GPU. All methods and seeds train together; D has the folders `cifar10` and `ptb`.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

from penstock.bench.convergence.method import parse_method
from penstock.bench.convergence.registry import make_task
from penstock.bench.convergence.study import seconds_per_step, train
from penstock.bench.convergence.summary import against_dense
from penstock.bench.convergence.tasks import Recipe
from penstock.bench.convergence.training import Fleet
from penstock.bench.record import make_record, save_record

METHODS = (
    "dense gtopk:0.001 gtopk:0.005 gtopk-published:0.001 gtopk-published:0.005 topk:0.001 topk:0.005 "
    "onebit terngrad dgc:0.001"
)


def main() -> int:
    """Run the study and print what each method ends with."""
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    task = make_task(options.task, Path(options.data), device)
    task = replace(task, global_batch=options.global_batch or task.global_batch)
    changed = {name: getattr(options, name) for name in ("steps", "learning_rate", "warmup", "clip")}
    recipe = replace(task.recipe, **{name: value for name, value in changed.items() if value is not None})
    methods = [parse_method(text) for text in options.methods.split()]
    seeds, workers = (tuple(int(text) for text in each.split(",")) for each in (options.seeds, options.workers))

    def fleets(recipe: Recipe) -> list[Fleet]:
        return [Fleet(task, recipe, methods, seeds, each, device) for each in workers]

    if options.budget:
        each = seconds_per_step(fleets(replace(recipe, steps=100)))
        recipe = replace(recipe, steps=min(recipe.steps, int(options.budget / each)))
        print(f"{task.name}: {1000 * each:.2f} ms a step, so {recipe.steps} steps", flush=True)
    rows = train(fleets(recipe), options.judged, options.seconds, lambda text: print(text, flush=True))
    save_record(make_record("convergence", rows, device=_device(device)), options.out)
    for line in against_dense(rows):
        worse = f"{100 * line['worse_than_dense']:.2f}% worse" if "worse_than_dense" in line else ""
        print(f"{line['workers']} workers, {line['method']:32} {line.get('final', math.nan):.4f} {worse}")
    return 0


def _device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--workers", default="4,8")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--global-batch", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--budget", type=float, default=0.0, help="seconds; fewer steps where all would take longer")
    parser.add_argument("--judged", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
