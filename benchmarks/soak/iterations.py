"""Does anything grow in 100,000 iterations? Memory, descriptors and threads of four ranks that plan again and again.

    python benchmarks/soak/iterations.py     # 100,000 in one go: what grows shows in processes that live on

The record is written after every thousand iterations, so that a run which is cut off leaves one of what it did.

Three wrappers of one small model take turns in each process: dense buckets, coded ones beside dense ones, and gTop-k's.
Every so many iterations one of them measures the network and plans again, by another planner, so that its buckets
change; in the first thousand each does so by each planner. The loss and the weights are those of real training.

How growth is judged. What happens in the first thousand iterations does not count: connections, kernels, malloc's
heap. From then on, each rank's samples are fitted by Theil and Sen's line (the median of the slopes of all pairs:
single peaks do not move it), and `growth` is what the line rises from the first of these samples to the last. Noise is
the median distance of samples from the line, times 1.4826 (a standard deviation where it is normal). Memory grows
where `growth` is more than 1 MiB and more than three times the noise; descriptors and threads are whole numbers
without noise: none may ever be above the most of the first thousand.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import numpy as np

from penstock.bench.jobs import LOOPBACK, Place, report, run_job
from penstock.bench.record import make_record, save_record

RANKS = 4
SETTLED = 1000  # iterations that do not count
REPORTED = 1000  # iterations between two records
FIRST_PLANS_EVERY = 100  # iterations, among those: every wrapper plans by every planner
MEMORY = ("rss_nbytes", "pss_nbytes", "private_nbytes")  # the last: dirty pages of this process alone
COUNTS = ("descriptors", "threads")
QUANTITIES = (*MEMORY, *COUNTS)
MOST_GROWTH_NBYTES = 1 << 20
NOISES = 3.0  # times the noise that a growth of memory must exceed
KINDS: Mapping[str, Mapping[str, Any]] = {  # of wrappers, by name
    "dense": {},
    "coded": {"codec": "blocks(bits=4)", "dense_below": 300},
    "gtopk": {"codec": "gtopk", "density": 0.01, "dense_below": 300},
}
PLANNERS = ("wfbp", "exact", "single")  # one after the other
OUT = str(Path(__file__).parents[1] / "results" / "soak-iterations.json")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SoakJob:
    """What the ranks are asked to do."""

    iterations: int  # of all wrappers together
    replan_every: int  # iterations
    sample_every: int  # iterations
    seconds: float  # after which they stop
    seed: int
    folder: str  # in which each rank keeps its samples


# One rank


def soak(job: SoakJob) -> Row | None:
    """Train, with samples in a file of each rank; return how it ended, on rank 0."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, until = dist.get_rank(), monotonic() + job.seconds
    wrappers = [_wrapper(options, job.seed) for options in KINDS.values()]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in wrappers]
    data = torch.Generator().manual_seed(job.seed * 1000 + rank)
    losses, plans = [0.0] * len(wrappers), 0
    samples = open(Path(job.folder, f"{rank}"), "w", buffering=1)  # noqa: SIM115  # a line at a time, to the end
    for iteration in range(1, job.iterations + 1):
        turn = iteration % len(wrappers)
        if iteration % (FIRST_PLANS_EVERY if iteration < SETTLED else job.replan_every) == 0:
            plans += 1
            _plan_again(wrappers[plans % len(wrappers)], PLANNERS[plans // len(wrappers) % len(PLANNERS)])
        losses[turn] = _step(wrappers[turn], optimizers[turn], data)
        if iteration % job.sample_every == 0:
            print(*sample(), file=samples)
            if _first_says(monotonic() > until):
                break
            if iteration % REPORTED == 0:
                report(rank, {"done": f"{iteration} iterations, {plans} plans"})
    same = _same_weights(wrappers)
    return None if rank else {"plans": plans, "losses": losses, "same_weights": same}


def _wrapper(options: Mapping[str, Any], seed: int) -> Any:
    import torch
    from torch import nn

    from penstock.torch import DistributedDataParallel

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return DistributedDataParallel(
        model, measurements=False, measure_seconds=0.2, profile_iterations=3, **dict(options)
    )


def _plan_again(wrapper: Any, planner: str) -> None:
    """Do what `replan_drift` does where rank 0 finds that communication has drifted, at an iteration of our choice."""
    planning = wrapper._planning
    planning.settings = replace(planning.settings, planner=planner)
    planning._plan_together(None)


def _step(wrapper: Any, optimizer: Any, data: Any) -> float:
    import torch

    inputs = torch.randn(8, 32, generator=data)
    loss = torch.nn.functional.mse_loss(wrapper(inputs)[:, 0], inputs[:, :8].sum(1).sin())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _first_says(mine: bool) -> bool:
    """Return rank 0's answer on all ranks."""
    import torch
    import torch.distributed as dist

    answer = torch.tensor(int(mine))
    dist.broadcast(answer, 0)
    return bool(answer)


def _same_weights(wrappers: Sequence[Any]) -> bool:
    import torch
    import torch.distributed as dist

    mine = torch.cat([each.detach().reshape(-1) for wrapper in wrappers for each in wrapper.parameters()])
    firsts = mine.clone()
    dist.broadcast(firsts, 0)
    same = torch.tensor(int(torch.equal(mine, firsts)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def sample() -> tuple[int, ...]:
    """Return this process's memory in bytes, descriptors and threads, as `QUANTITIES` names them."""
    pages = Path("/proc/self/smaps_rollup").read_text()
    sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in pages.splitlines()[1:]}
    memory = (sizes["Rss:"], sizes["Pss:"], sizes["Private_Dirty:"])
    return (*memory, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


def rank_main() -> None:
    """Be one rank of the job that is given as JSON at the end of the command line."""
    import torch.distributed as dist

    from penstock.runtime.transport.meeting import join_group

    job = SoakJob(**json.loads(sys.argv[-1]))
    join_group("gloo")
    if (row := soak(job)) is not None:
        report(0, row)
    dist.barrier()
    dist.destroy_process_group()


# What the samples say


def theil_sen(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the slope of Theil and Sen's line and the noise around it, in the units of `y`.

    >>> theil_sen(np.arange(5.0), np.array([0.0, 1, 2, 99, 4]))
    (1.0, 0.0)
    """
    first, second = np.triu_indices(len(x), 1)
    slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
    rest = y - slope * x
    return slope, 1.4826 * float(np.median(np.abs(rest - np.median(rest))))


def judge(samples: np.ndarray, sample_every: int) -> list[Row]:
    """Return a row for each quantity of one rank; `samples` has a line for every `sample_every` iterations."""
    iterations = sample_every * np.arange(1, len(samples) + 1)
    late = iterations > SETTLED
    rows = []
    for name, values in zip(QUANTITIES, samples.T, strict=True):
        slope, noise = theil_sen(iterations[late].astype(float), values[late])
        growth = slope * float(iterations[-1] - iterations[late][0])
        above = float(values[late].max() - values[~late].max())
        grows = above > 0 if name in COUNTS else growth > max(MOST_GROWTH_NBYTES, NOISES * noise)
        rows.append(
            {
                "quantity": name,
                "before": float(values[~late][-1]),
                "last": float(values[-1]),
                "most_above_the_first": above,
                "growth": growth,
                "slope_per_thousand": 1000 * slope,
                "noise": noise,
                "grows": bool(grows),
            }
        )
    return rows


def worst(rows: Sequence[Row]) -> list[Row]:
    """Return the row of the rank that grew most, for each quantity."""
    found = [[row for row in rows if row["quantity"] == name] for name in QUANTITIES]
    return [max(each, key=lambda row: float(row["growth"])) for each in found]


def read_samples(folder: Path) -> list[np.ndarray]:
    """Return what each rank has sampled so far, as many lines of each."""
    texts = [Path(folder, f"{rank}").read_text() for rank in range(RANKS)]
    whole = [text[: text.rfind("\n") + 1].splitlines() for text in texts]  # a rank may be writing
    lines = min(map(len, whole))
    return [np.array([each.split() for each in found[:lines]], float) for found in whole]


def make_rows(samples: Sequence[np.ndarray], sample_every: int) -> list[Row]:
    """Return a row for each rank and quantity."""
    return [{"rank": rank, **row} for rank, each in enumerate(samples) for row in judge(each, sample_every)]


def keep(job: SoakJob, samples: Sequence[np.ndarray], ended: Row, out: str) -> list[Row]:
    """Write the record; return its rows, of all ranks. `ended`: what rank 0 says, as far as it has."""
    rows = make_rows(samples, job.sample_every)
    notes = {
        "iterations": job.sample_every * len(samples[0]),
        "plans": ended["plans"],
        "same_weights": ended.get("same_weights"),  # None: not compared yet
        "last_losses": dict(zip(KINDS, ended.get("losses", ()), strict=False)),
        "grown": [f"rank {row['rank']}: {row['quantity']}" for row in rows if row["grows"]],
        "samples_of_rank_0": {name: samples[0][:: max(1, len(samples[0]) // 50), at].tolist()
                              for at, name in enumerate(QUANTITIES)},
    }  # fmt: skip
    asked = {name: value for name, value in asdict(job).items() if name != "folder"}
    save_record(make_record("soak-iterations", worst(rows), job=asked, **notes), out)
    return rows


def main() -> None:
    """Run the soak on loopback, judge it, and keep the record; exit with 1 where something grows, or too soon."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=14_400.0, help="stop after so long, and exit with 1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replan-every", type=int, default=1000, help="iterations between plans, after the first")
    parser.add_argument("--sample-every", type=int, default=100)
    parser.add_argument("--out", default=OUT, help="keep the record here")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="penstock-iterations-") as folder:
        job = SoakJob(given.iterations, given.replan_every, given.sample_every, given.seconds, given.seed, folder)
        begun = monotonic()

        def progressed(said: str) -> None:
            print(f"{monotonic() - begun:.0f} s: {said}", file=sys.stderr, flush=True)
            samples = read_samples(Path(folder))
            if len(samples[0]) * job.sample_every > 2 * SETTLED:
                keep(job, samples, {"plans": int(said.split()[2])}, given.out)

        worker = (str(Path(__file__).resolve()), "--rank")
        (ended,) = run_job(Place(RANKS, LOOPBACK), worker, asdict(job), progressed, given.seconds + 600.0)
        samples = read_samples(Path(folder))
    rows, done = keep(job, samples, ended, given.out), job.sample_every * len(samples[0])
    for row in rows:
        print(f"rank {row['rank']} {row['quantity']:14} before {row['before']:13.0f} last {row['last']:13.0f} "
              f"growth {row['growth']:12.0f} noise {row['noise']:11.0f} {'GROWS' if row['grows'] else ''}")  # fmt: skip
    grown = [row for row in rows if row["grows"]]
    print(f"{done} iterations, {ended['plans']} plans; {len(grown) or 'nothing'} grown")
    sys.exit(bool(grown) or not ended["same_weights"] or done < job.iterations)


if __name__ == "__main__":
    rank_main() if sys.argv[1:2] == ["--rank"] else main()
