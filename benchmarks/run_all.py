"""Every question of the benchmarks, one after the other, then the page: what `make bench` runs, in under half an hour.

Needs root. `python benchmarks/run_all.py train casync` runs only these, and `--all` (`make bench-all`) more hosts
and larger models too, about three quarters of an hour. A benchmark that fails does not stop the others.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
RESULTS = "benchmarks/results"
ALL = "--all"
BUCKETS = "no-communication,ddp,ddp-1,ddp-5,ddp-25,ddp-100,penstock-exact"
OTHERS = "ddp-fp16,ddp-powersgd,penstock-bsp-split,penstock-onebit,penstock-terngrad,penstock-gtopk"
LARGE = f"--methods {BUCKETS} --rounds 5 --iterations 1 --warmup 2 --startup none"
ONE_SIZE = "--sizes 16000000"
ONE_TRACE = "--traces googlenet --planners"
MESSAGE = "--nbytes 16000000"
RATES = "--rate 100mbit --rate 500mbit --rate 1gbit --rate 2gbit --rate none"
SPARSE = "--patience 5 --dense-rounds 1"
Run = tuple[str, str, str]  # a script of this folder or a verb of `penstock bench`, where its record is kept, options
RUNS: tuple[Run, ...] = (
    ("demo", "demo", ""),
    ("train", "train", f"--models vgg16_cifar:8 --methods {BUCKETS},{OTHERS} --rounds 5 --iterations 3"),
    ("replay", "replay", "--hosts 4 --iterations 2"),
    ("gains", "gains", ""),
    ("casync", "joint-replayed", "--hosts 4 --study joint --traces resnet50,googlenet,lstm_ptb --iterations 15"),
    ("casync", "casync-vgg-4-hosts", "--hosts 4 --traces vgg16:ring --codecs onebit --iterations 5"),
    ("casync", "casync-bert-4-hosts", "--hosts 4 --traces bert_base:ring --codecs onebit --iterations 5"),
    ("sparse", "sparse-4-hosts", f"--hosts 4 --engine gloo,mpi {SPARSE}"),
    ("collectives", "collectives-loopback-16-mb", f"--hosts 4 --rate loopback --engine gloo {ONE_SIZE} --no-measure"),
    ("collectives", "collectives-4-hosts-16-mb", "--hosts 4 --sizes 65536,16000000 --rounds 4 --patience 10"),
    ("collectives", "collectives-2-8-hosts-16-mb", f"--hosts 2,8 {ONE_SIZE} --rounds 3 --patience 10"),
    (
        "replay",
        "scaling",
        f"--name scaling --hosts 2,4,8,16 {ONE_TRACE} wfbp,threshold,exact --iterations 2 {MESSAGE}",
    ),
    ("replay", "rates", f"--name rates {RATES} {ONE_TRACE} threshold,exact --iterations 2 --nbytes 4000000"),
    ("coordinator", "coordinator", "--hosts 4,8 --iterations 3"),
    ("links", "links", ""),
    ("memory", "memory", "--models vgg16_cifar:8 --repetitions 4"),
    ("joint", "joint", ""),
    ("profile_overhead", "profile_cpu", ""),
    ("codecs", "codecs_cpu", "--rounds 7"),
    ("planning_time", "planners", ""),
    ("interpreter_share", "interpreter_share", ""),
)
LONGER: tuple[Run, ...] = (
    ("replay", "replay-8-hosts", "--hosts 8 --iterations 1"),
    ("sparse", "sparse-8-hosts", f"--hosts 8 --engine gloo,mpi {SPARSE}"),
    ("sparse", "sparse-16-hosts", f"--hosts 16 --merges waited {SPARSE}"),
    ("casync", "casync-vgg-8-hosts", "--hosts 8 --traces vgg16:ring --codecs onebit --iterations 5"),
    ("casync", "casync-bert-8-hosts", "--hosts 8 --traces bert_base:ring --codecs onebit --iterations 5"),
    ("train", "train-resnet50", f"--models resnet50:1 {LARGE}"),
    ("train", "train-lstm_ptb", f"--models lstm_ptb:1 {LARGE}"),
    ("gtop_k", "gtop-k-table-7", ""),
    ("frameworks", "frameworks", "--hosts 4 --rounds 2"),
)


def command_of(name: str) -> list[str]:
    """Return what starts a benchmark: a script beside this one, otherwise a verb of `penstock bench`."""
    script = FOLDER / f"{name}.py"
    return [os.path.relpath(script)] if script.exists() else ["-m", "penstock", "bench", name]


def main(wanted: Sequence[str]) -> int:
    """Run the benchmarks of these names, or all of a list, then make the page; return the exit code."""
    names = set(wanted) - {ALL}
    chosen = RUNS + LONGER if names or ALL in wanted else RUNS
    runs = [run for run in chosen if not names or run[0] in names]
    failed, begun = [], time.monotonic()
    for number, (name, record, options) in enumerate(runs, 1):
        command = [*command_of(name), *options.split(), "--out", f"{RESULTS}/{record}.json"]
        minutes = (time.monotonic() - begun) / 60
        print(f"[{number}/{len(runs)}] {minutes:.1f} min: python {' '.join(command)}", flush=True)
        if subprocess.run([sys.executable, *command], check=False).returncode:
            failed.append(record)
    subprocess.run([sys.executable, *command_of("page")], check=True)
    print(f"{(time.monotonic() - begun) / 60:.1f} min" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
