"""Trains by every method and keeps the curves: `python benchmarks/convergence/run.py resnet20 --data D --out F.json`.

Needs PyTorch only. On a GPU many runs go at once; D has the folders `cifar10` and `ptb`.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from penstock.bench.convergence.method import parse_method
from penstock.bench.convergence.study import Study, run_study
from penstock.bench.convergence.summary import against_dense
from penstock.bench.convergence.tasks import make_task
from penstock.bench.record import make_record, save_record

METHODS = (
    "dense gtopk:0.001 gtopk-published:0.001 topk:0.001 gtopk:0.005 gtopk-published:0.005 topk:0.005 "
    "onebit terngrad:nofeedback dgc:0.001"
)


def main() -> int:
    """Run the study and print what each method ends with."""
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    task = make_task(options.task, Path(options.data), device)
    methods = tuple(parse_method(text) for text in options.methods.split())
    workers, seeds = (tuple(int(text) for text in each.split(",")) for each in (options.workers, options.seeds))
    study = Study(methods, workers, seeds, options.epochs or task.epochs, options.judged, options.seconds)
    rows: list[dict[str, Any]] = []
    begun, total = time.monotonic(), len(study.runs())

    def done(row: dict[str, Any]) -> None:
        rows.append(row)
        said = f"{row['method']}, {row['workers']} workers, seed {row['seed']}: {task.metric} {row['final']:.4f}"
        print(f"[{len(rows)}/{total}] {time.monotonic() - begun:.0f} s: {said}", flush=True)
        save_record(make_record("convergence", rows, device=_device(device)), options.out)

    run_study(task, study, device, options.at_once, done)
    for line in against_dense(rows):
        worse = f"{100 * line['worse_than_dense']:.2f}% worse" if "worse_than_dense" in line else ""
        print(f"{line['workers']} workers, {line['method']:24} {line['final']:.4f} {worse}")
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
    parser.add_argument("--epochs", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--judged", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=12)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
