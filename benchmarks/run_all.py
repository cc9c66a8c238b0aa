"""Every benchmark, one after the other, then the page: what `make bench` runs. Needs root; under half an hour.

`python benchmarks/run_all.py train replay` runs only these. A benchmark that fails does not stop the others.
"""

import subprocess
import sys
import time
from collections.abc import Sequence

from penstock.cli.bench import bench

RESULTS = "benchmarks/results"
BUCKETS = "no-communication,ddp,ddp-1,ddp-5,ddp-25,ddp-100,penstock-exact"
OTHERS = "ddp-fp16,ddp-powersgd,penstock-bsp-split,penstock-onebit,penstock-terngrad,penstock-gtopk"
ONE_SIZE = "--sizes 16000000"
RUNS: tuple[tuple[str, str, str], ...] = (  # verb, where its record is kept, options
    ("train", "train", f"--models vgg16_cifar:8 --methods {BUCKETS},{OTHERS}"),
    ("train", "train-resnet50", f"--models resnet50:1 --methods {BUCKETS} --rounds 2 --iterations 1"),
    ("train", "train-lstm_ptb", f"--models lstm_ptb:1 --methods {BUCKETS} --rounds 2 --iterations 1 --warmup 2"),
    ("replay", "replay", "--hosts 4 --iterations 2"),
    ("replay", "replay-8-hosts", "--hosts 8 --iterations 1"),
    ("gains", "gains", ""),
    ("joint", "joint", ""),
    ("casync", "joint-replayed", "--hosts 4 --study joint --traces resnet50,googlenet,lstm_ptb --iterations 3"),
    ("casync", "casync-vgg-4-hosts", "--hosts 4 --traces vgg16:parameter_server --codecs onebit"),
    ("casync", "casync-bert-4-hosts", "--hosts 4 --traces bert_base:ring --codecs onebit --iterations 1"),
    ("casync", "casync-vgg-8-hosts", "--hosts 8 --traces vgg16:parameter_server --codecs onebit --iterations 1"),
    ("casync", "casync-bert-8-hosts", "--hosts 8 --traces bert_base:ring --codecs onebit --iterations 1"),
    ("sparse", "sparse-4-hosts", "--hosts 4 --engine gloo,mpi --patience 5 --dense-rounds 1"),
    ("sparse", "sparse-8-hosts", "--hosts 8 --links coarse --engine gloo,mpi --patience 5 --dense-rounds 1"),
    ("sparse", "sparse-16-hosts", "--hosts 16 --links coarse --merges waited --patience 5 --dense-rounds 1"),
    ("sparse", "sparse-16-hosts-smooth", "--hosts 16 --merges waited --patience 5 --dense-rounds 1"),
    ("collectives", "collectives-loopback-16-mb", f"--hosts 4 --rate loopback --engine gloo {ONE_SIZE} --no-measure"),
    ("collectives", "collectives-4-hosts-16-mb", "--hosts 4 --sizes 65536,16000000 --rounds 4 --patience 10"),
    ("collectives", "collectives-2-8-hosts-16-mb", f"--hosts 2,8 {ONE_SIZE} --rounds 3 --patience 10"),
    ("scaling", "scaling", "--iterations 2"),
    ("rates", "rates", "--nbytes 4000000"),
    ("coordinator", "coordinator", "--hosts 4,8 --iterations 3"),
    ("gtop-k", "gtop-k-table-7", "--iterations 1"),
    ("links", "links", ""),
    ("memory", "memory", "--repetitions 2"),
    ("profile", "profile_cpu", ""),
    ("codecs", "codecs_cpu", "--rounds 7"),
    ("planners", "planners", ""),
)


def main(wanted: Sequence[str]) -> int:
    verbs = {command.name for command in bench.registered_commands}
    runs = [run for run in RUNS if run[0] in verbs and (not wanted or run[0] in wanted)]
    failed, begun = [], time.monotonic()
    for number, (verb, record, options) in enumerate(runs, 1):
        command = ["bench", verb, *options.split(), "--out", f"{RESULTS}/{record}.json"]
        minutes = (time.monotonic() - begun) / 60
        print(f"[{number}/{len(runs)}] {minutes:.1f} min: penstock {' '.join(command)}", flush=True)
        if subprocess.run([sys.executable, "-m", "penstock", *command], check=False).returncode:
            failed.append(record)
    subprocess.run([sys.executable, "-m", "penstock", "bench", "page"], check=True)
    print(f"{(time.monotonic() - begun) / 60:.1f} min" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
