"""Every question of the benchmarks, one after the other, then the page: what `make bench` runs, in under half an hour.

Needs root. `python benchmarks/run_all.py train casync` runs only these, and `--all` (`make bench-all`) more hosts,
larger models and replays in slow motion too, about two hours. A benchmark that fails does not stop the
others.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
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
JOINT = "--study joint --traces resnet50,googlenet,lstm_ptb --iterations 15"
STEPS = "--codecs onebit --iterations 9"
FEWER_STEPS = "--codecs onebit --iterations 5"  # in slow motion, where they differ less
ONE_CORE = "--slower 2"  # on two cores: each of four hosts then has one core of this machine, against its links
SLOW = "--seconds 8 --slower 8"  # a core four times as fast; of eight hosts, twice
FAST = "--rate 10gbit --seconds 8 --slower 32"  # sixteen and eight times
RATES = "--rate 100mbit --rate 500mbit --rate 1gbit --rate 2gbit --rate none"
SPARSE = "--patience 5 --dense-rounds 1"
Run = tuple[str, str, str]  # a script of this folder or a verb of `penstock bench`, where its record is kept, options
TRACES = {"vgg": "vgg16", "bert": "bert_base"}


def _steps(hosts: int, how: str, options: str, models: Iterable[str] = tuple(TRACES)) -> list[Run]:
    """Return the runs of HiPress's steps on so many hosts, a model each."""
    return [
        ("casync", f"casync-{name}-{hosts}-hosts{how}", f"--hosts {hosts} --traces {TRACES[name]}:ring {options}")
        for name in models
    ]


RUNS: tuple[Run, ...] = (
    ("demo", "demo", ""),
    ("train", "train", f"--models vgg16_cifar:8 --methods {BUCKETS},{OTHERS} --rounds 5 --iterations 3"),
    ("replay", "replay", "--hosts 4 --iterations 2"),
    ("gains", "gains", ""),
    ("casync", "joint-replayed", f"--hosts 4 {JOINT}"),
    ("casync", "joint-replayed-400mbit", f"--hosts 4 --rate 400mbit {JOINT}"),
    *_steps(4, "", STEPS),
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
    *_steps(8, "", STEPS),
    *_steps(4, "-one-core", f"{FEWER_STEPS} --seconds 8 {ONE_CORE}"),
    ("casync", "joint-replayed-one-core", f"--hosts 4 {JOINT} {ONE_CORE}"),
    *_steps(4, "-slow", f"{FEWER_STEPS} {SLOW}"),
    *_steps(8, "-slow", f"{FEWER_STEPS} {SLOW}", ("vgg",)),
    *(run for hosts in (4, 8) for run in _steps(hosts, "-10gbit", f"{FEWER_STEPS} {FAST}")),
    ("casync", "joint-replayed-10gbit", f"--hosts 4 {JOINT} {FAST}"),
    ("train", "train-resnet50", f"--models resnet50:1 {LARGE}"),
    ("train", "train-lstm_ptb", f"--models lstm_ptb:1 {LARGE}"),
    ("gtop_k", "gtop-k-table-7", ""),
    ("frameworks", "frameworks", "--hosts 4 --rounds 2"),
)
_REPLAYED = [record for name, record, _ in RUNS + LONGER if name == "casync"]
ONE_CORE_STEPS = [record for record in _REPLAYED if record.startswith("casync-") and record.endswith("-one-core")]
ONE_CORE_JOINT = [record for record in _REPLAYED if record.startswith("joint-") and record.endswith("-one-core")]
STEP_RECORDS = [record for record in _REPLAYED if record.startswith("casync-") and record not in ONE_CORE_STEPS]
JOINT_RECORDS = [record for record in _REPLAYED if record.startswith("joint-") and record not in ONE_CORE_JOINT]


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
