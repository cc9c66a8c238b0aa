"""Do links that fail and hosts that are slow change a result, or hang a job? On emulated hosts; needs root.

    python benchmarks/soak/links.py --seed 1 --seconds 900 --out benchmarks/results/soak-links.json

A job averages gradients step after step by one route, and notes a digest of each average, over all steps so far. While
it runs, disturbances follow one another, drawn from a seed: a cable is pulled for milliseconds to seconds, a link falls
to 1 Mb/s, a port's queue holds two frames (packets are lost; the kernel's `netem`, which would lose them at random, is
missing on many machines and is not needed), a host gets a tenth of its time (SIGSTOP and SIGCONT by turns). Then the
same steps run once more undisturbed: every digest of every step must be the same, on all ranks.

Last, a cable is pulled for good: every rank must end with one error, within the timeout and what finding out takes.
The same is allowed where a disturbance that ends was too long; wrong values, hangs and silent ranks are not.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import numpy as np

from penstock.bench.record import make_record, save_record
from penstock.cluster.building import Bucket, smooth_bucket
from penstock.cluster.emulate import EmulatedCluster, emulated_cluster
from penstock.errors import ClusterError

RATE, SLOW_RATE, LOSSY_RATE = 10**9, 10**6, 10**8  # bits per second
NUMEL = {"weight": 40_000, "bias": 200}  # of the tensors that are averaged
TIMEOUT_SECONDS = 20.0  # of the job's messages
FINDING_OUT_SECONDS = 60.0  # beyond that, in which ranks tell one another who is gone; the machine may be busy
START_SECONDS = 240.0  # in which a job must have begun
BEGAN = "soak-links began"
OUT = str(Path(__file__).parents[1] / "results" / "soak-links.json")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A route and where it runs."""

    name: str
    hosts: int
    strategy: str
    codec: str | None = None
    per_host: int = 1
    engine: str = "gloo"


CASES = (
    Case("dense native", 3, "native"),
    Case("coded ring", 4, "ring", "onebit"),
    Case("parameter server", 3, "parameter_server", "blocks(bits=4)"),
    Case("sparse gtopk", 4, "gtopk", "sparse(density=0.01)"),
    Case("hierarchical", 2, "hierarchical", "onebit", per_host=2),
    Case("dense ring, MPI", 2, "ring", engine="mpi"),
)


@dataclass(frozen=True, slots=True)
class LinksJob:
    """What the ranks are asked to do."""

    case: Case
    seed: int
    steps: int  # at most
    stop: str  # a file: rank 0 ends the job when it is there
    notes: str  # folder of what ranks tell: a host without a cable cannot tell mpirun


# One rank


def work(job: LinksJob) -> None:
    """Average gradients until all is done; print a digest after each step."""
    from penstock.exchange.compression import Compression
    from penstock.exchange.exchange import Exchange
    from penstock.plan import Bucket as Message
    from penstock.plan import Plan
    from penstock.runtime.communicator import Communicator
    from penstock.runtime.connect import connected

    case, names = job.case, tuple(NUMEL)
    with connected(case.engine) as transport:
        communicator = Communicator(transport, timeout_seconds=TIMEOUT_SECONDS)
        exchange = Exchange(communicator, Compression(case.codec))
        nbytes = 4 * sum(NUMEL.values())
        messages = (Message(names, nbytes, case.strategy, case.codec), Message(("stop",), 4, "ring"))
        exchange.follow(Plan("links", transport.world_size, "exact", messages))
        gradients, stops = exchange.bucket(names, list(NUMEL.values())), exchange.bucket(("stop",), [1])
        digest = hashlib.sha256()
        for step in range(job.steps):
            generator = np.random.default_rng([job.seed, transport.rank, step])
            values = generator.standard_normal(sum(NUMEL.values())).astype(np.float32)
            stop = np.array([transport.rank == 0 and os.path.exists(job.stop)], np.float32)
            exchange.begin()
            for handle in [exchange.start(gradients, values), exchange.start(stops, stop)]:
                exchange.wait(handle)
            digest.update(values.tobytes())
            say(job, transport.rank, step=step, digest=digest.hexdigest()[:16])
            if stop[0]:
                break
            sleep(0.01)
        exchange.close()
    say(job, transport.rank, done=True)


def say(job: LinksJob, rank: int, **values: Any) -> None:
    """Tell the process that started this rank: by a file, and that it has begun at once."""
    with open(Path(job.notes) / f"rank-{rank}", "a") as file:
        file.write(json.dumps(values) + "\n")
    if values.get("step") == 2 or "error" in values:
        print(BEGAN, flush=True)


def rank_main() -> None:
    """Be one rank of the job that is given as JSON at the end of the command line."""
    from penstock.torch.engines import end_mpi

    document = json.loads(sys.argv[-1])
    job, rank = LinksJob(Case(**document.pop("case")), **document), int(os.environ["RANK"])
    try:
        work(job)
    except Exception as error:
        say(job, rank, error=f"{type(error).__name__}: {error}".splitlines()[0], at=monotonic())
        os._exit(3)  # gloo's own shutdown may wait for ranks that are gone
    if job.case.engine == "mpi":  # mpirun takes a rank that leaves without MPI's own shutdown for one that failed
        end_mpi()
    os._exit(0)


# What happens meanwhile


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One thing that happens to one host."""

    kind: str
    host: int
    seconds: float


def draw(generator: random.Random, hosts: int) -> Disturbance:
    """Return the next disturbance."""
    kind = generator.choice(tuple(KINDS))
    longest = 3.0 if kind == "link down" else 4.0
    return Disturbance(kind, generator.randrange(hosts), round(0.005 * (longest / 0.005) ** generator.random(), 4))


def _down(cluster: EmulatedCluster, each: Disturbance) -> None:
    cluster.set_link(each.host, False)
    sleep(each.seconds)
    cluster.set_link(each.host, True)


def _limited(bucket: Bucket) -> Callable[[EmulatedCluster, Disturbance], None]:
    def disturb(cluster: EmulatedCluster, each: Disturbance) -> None:
        cluster.set_rate(each.host, bucket)
        sleep(each.seconds)
        cluster.set_rate(each.host, smooth_bucket(RATE))

    return disturb


def _tenth(cluster: EmulatedCluster, each: Disturbance) -> None:
    """Let a host run for 10 ms of every 100; what it starts meanwhile is not slowed."""
    inside, until = cluster.processes(each.host), monotonic() + each.seconds
    while monotonic() < until:
        for number, seconds in ((signal.SIGSTOP, 0.09), (signal.SIGCONT, 0.01)):
            for process in inside:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            sleep(seconds)


LOSSY = Bucket(LOSSY_RATE, 2 * 9014, 3 * 9014)  # what comes while two frames wait is lost
KINDS: dict[str, Callable[[EmulatedCluster, Disturbance], None]] = {
    "link down": _down,
    "1 Mb/s": _limited(smooth_bucket(SLOW_RATE)),
    "packets lost": _limited(LOSSY),
    "a tenth of the time": _tenth,
}


class Said:
    """What ranks have told, by rank."""

    def __init__(self, ranks: int) -> None:
        self.steps: list[list[str]] = [[] for _ in range(ranks)]  # digests
        self.errors: dict[int, list[str]] = {}
        self.failed_at = 0.0  # the last of them, by the clock of this machine
        self.done: set[int] = set()
        self.began, self.other = Event(), list[str]()

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Take one line that a process printed."""
        if BEGAN in line:
            self.began.set()
        else:
            self.other.append(line.strip())

    def collect(self, notes: Path) -> None:
        """Read what ranks have written, and remove it."""
        for rank, steps in enumerate(self.steps):
            path = notes / f"rank-{rank}"
            for found in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
                if "error" in found:
                    self.errors.setdefault(rank, []).append(found["error"])
                    self.failed_at = max(self.failed_at, found["at"])
                elif "done" in found:
                    self.done.add(rank)
                else:
                    steps.append(found["digest"])
            path.unlink(missing_ok=True)


def run(cluster: EmulatedCluster, job: LinksJob, meanwhile: Callable[[], None], seconds: float) -> tuple[Said, float]:
    """Run a job with something going on meanwhile; return what was said and how long after that it ended.

    Where ranks fail, that is when the last of them has: mpirun cannot reach the host that has no cable, and waits.
    """
    said, ended = Said(job.case.hosts * job.case.per_host), [0.0]

    def later() -> None:
        if said.began.wait(START_SECONDS):
            meanwhile()
        ended[0] = monotonic()

    thread = Thread(target=later)
    thread.start()
    command = [sys.executable, str(Path(__file__).resolve()), "--rank", json.dumps(asdict(job))]
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        with contextlib.suppress(ClusterError):  # a time-out: ranks that have not ended are counted
            cluster.run(
                command,
                engine=job.case.engine,
                per_host=job.case.per_host,
                environment=environment,
                sink=said,
                grace_seconds=FINDING_OUT_SECONDS,
                timeout_seconds=START_SECONDS + seconds,
            )
    finally:
        said.began.set()
        thread.join()
    now = monotonic()
    said.collect(Path(job.notes))
    return said, (said.failed_at or now) - ended[0]


def judge(said: Said, undisturbed: Said | None) -> str:
    """Return what became of a disturbed run: `same`, `error on all ranks`, or what is wrong."""
    ranks = range(len(said.steps))
    for rank, each in enumerate(said.steps):
        if each != said.steps[0][: len(each)]:
            return f"WRONG: rank {rank} has another average than rank 0"
        if undisturbed is not None and each != undisturbed.steps[0][: len(each)]:
            return f"WRONG: rank {rank} has another average than undisturbed"
    if said.done == set(ranks) and not said.errors:
        return "same"
    if set(said.errors) == set(ranks) and all(len(each) == 1 for each in said.errors.values()):
        return "error on all ranks"
    silent = sorted(set(ranks) - set(said.errors) - said.done)
    return f"WRONG: errors on ranks {sorted(said.errors)}, nothing from {silent}"


def soak_case(case: Case, seed: int, count: int, seconds: float) -> list[Row]:
    """Run one route: disturbed, undisturbed, and with a cable that stays out; return a row for each of the first two.

    Disturbances of one run that is still going are rows of their own; what came of the run is said of all of them.
    """
    generator, met = random.Random(f"{case.name} {seed}"), list[Disturbance]()
    planned, for_good = [draw(generator, case.hosts) for _ in range(count)], generator.randrange(case.hosts)
    with tempfile.TemporaryDirectory() as folder, emulated_cluster(case.hosts, f"{RATE}bit") as cluster:
        stop, until = Path(folder) / "stop", monotonic() + seconds

        def disturb() -> None:
            for each in planned:
                if monotonic() < until:
                    met.append(each)
                    KINDS[each.kind](cluster, each)
                    sleep(0.05)
            stop.touch()

        said, after = run(cluster, LinksJob(case, seed, 10**6, str(stop), folder), disturb, seconds + 120.0)
        stop.unlink(missing_ok=True)
        steps = max(map(len, said.steps))
        quiet, _ = run(cluster, LinksJob(case, seed, max(steps, 3), str(stop), folder), lambda: None, 300.0)
        verdict = judge(said, quiet) if judge(quiet, None) == "same" else f"WRONG: undisturbed, {judge(quiet, None)}"
        rows = [_row(case, seed, each, verdict, steps, after, said) for each in met]
        lost, after = run(
            cluster,
            LinksJob(case, seed, 10**6, str(stop), folder),
            lambda: cluster.set_link(for_good, False),
            TIMEOUT_SECONDS + 2 * FINDING_OUT_SECONDS,
        )
        verdict = judge(lost, None)
        if verdict == "error on all ranks" and after > TIMEOUT_SECONDS + FINDING_OUT_SECONDS:
            verdict = f"WRONG: ended after {after:.0f} s, the timeout is {TIMEOUT_SECONDS:g}"
        if verdict == "same":
            verdict = "WRONG: it went on without a cable"
        pulled = Disturbance("link down for good", for_good, after)
        return [*rows, _row(case, seed, pulled, verdict, max(map(len, lost.steps)), after, lost)]


def _row(case: Case, seed: int, each: Disturbance, verdict: str, steps: int, after: float, said: Said) -> Row:
    bad = verdict.startswith("WRONG")
    return {
        "case": case.name,
        "hosts": case.hosts,
        "engine": case.engine,
        "seed": seed,
        **asdict(each),
        "steps": steps,
        "outcome": verdict,
        "ended_after_seconds": round(after, 1),
        "errors": sorted({error for found in said.errors.values() for error in found})[:4],
        **({"said": said.other[-5:]} if bad else {}),
    }


def main() -> None:
    """Disturb every route in turn; exit with 1 where a result is wrong or a rank hangs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=900.0, help="begin no further route after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--disturbances", type=int, default=25, help="of each run")
    parser.add_argument("--cases", default="", help=f"some of: {', '.join(case.name for case in CASES)}")
    parser.add_argument("--out", default=OUT, help="keep the record here")
    given = parser.parse_args()
    wanted = [case for case in CASES if not given.cases or case.name in given.cases]
    rows: list[Row] = []
    until = monotonic() + given.seconds
    for seed in range(given.seed, given.seed + 1000):
        for case in wanted:
            if monotonic() > until:
                break
            rows += soak_case(case, seed, given.disturbances, 120.0)
            print(f"{case.name}, seed {seed}: {rows[-2]['outcome'] if len(rows) > 1 else ''}; "
                  f"for good: {rows[-1]['outcome']} after {rows[-1]['ended_after_seconds']} s", flush=True)  # fmt: skip
            if given.out:
                save_record(record(rows), given.out)
    found = record(rows)
    for row in found["rows"]:
        print(row)
    sys.exit(bool(found["bad"]))


def record(made: Sequence[Row]) -> Row:
    """Return the record: how many disturbances of each kind ended how, by route, and all that went wrong."""
    tables: dict[tuple[str, str], list[Row]] = {}
    for each in made:
        tables.setdefault((each["case"], each["kind"]), []).append(each)
    rows = [_counted(found) for found in tables.values()]
    bad = [each for each in made if each["outcome"].startswith("WRONG")]
    seeds = sorted({each["seed"] for each in made})
    by = "a port whose queue holds two frames; netem is not used"
    return make_record("soak-links", rows, disturbances=len(made), seeds=seeds, packets_are_lost_by=by, bad=bad)


def _counted(found: Sequence[Row]) -> Row:
    outcomes = [each["outcome"] for each in found]
    return {
        "route": found[0]["case"],
        "hosts": found[0]["hosts"],
        "engine": found[0]["engine"],
        "kind": found[0]["kind"],
        "disturbances": len(found),
        "shortest_seconds": min(each["seconds"] for each in found),
        "longest_seconds": max(each["seconds"] for each in found),
        "same_bits": outcomes.count("same"),
        "error_on_all_ranks": outcomes.count("error on all ranks"),
        "wrong_or_hanging": sum(each.startswith("WRONG") for each in outcomes),
    }


if __name__ == "__main__":
    rank_main() if sys.argv[1:2] == ["--rank"] else main()
