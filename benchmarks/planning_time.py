"""How long planning takes: `exact` beside the greedy, up to 100,000 tensors, every planner by every strategy on
10,000, dense, coded and sparse, the same in lanes, and a 2,048-worker study.

Instances are random with a fixed seed: gaps and sizes such that about as much is sent as computed, where the queue of
`exact` is busiest.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from rich.progress import track

from penstock.bench.record import make_record, save_record
from penstock.cli.options import JsonOption, RecordOption
from penstock.cli.output import format_seconds, print_json, print_table, stderr_console
from penstock.cost.clusters import CLUSTERS
from penstock.cost.ways import Way, comparable, compressed_ways, way_for, ways_for
from penstock.network import LinearCost
from penstock.planners import PLANNERS
from penstock.planners.batched import plan_batched
from penstock.simulator.composition import plans_in_lanes
from penstock.simulator.fitted import fitted_cost
from penstock.simulator.iteration import predict
from penstock.simulator.scaling import scaling_study
from penstock.strategies import coded_only_names, names, sparse_names
from penstock.trace import Tensor, Trace
from penstock.traces import find_trace
from study import Claim, claim_documents, start

SIZES = (100, 1_000, 10_000, 100_000)
QUADRATIC_UP_TO = 1_000  # the published text is quadratic; beyond this it would take minutes
REPEATS = 7
PAIRS_TENSORS = 10_000
MOST_SECONDS = 1.0  # for such a plan
WAY = Way("ring", (LinearCost(1e-4, 10e-6 / 40_000),))
STUDY_WORKERS = [2**exponent for exponent in range(2, 12)]
LANE_PLANNERS = ("wfbp", "exact", "joint")
STUDY_PLANNERS = ("wfbp", "single", "threshold", "greedy", "exact")


def random_trace(count: int, seed: int = 1) -> Trace:
    """Return a trace of `count` tensors with random gaps (mean 10 us) and sizes (mean 10,000 elements)."""
    generator = random.Random(seed)
    tensors = (
        Tensor(f"t{i}", generator.randrange(20_000), generator.expovariate(1e5)) for i in range(count)
    )  # fmt: skip
    return Trace(f"random{count}", "none", 1, "float32", 1e-3, tuple(tensors))


def greedy_ends_as_published(ready: Sequence[float], sizes: Sequence[int], a: float, b: float) -> list[int]:
    """Transcribe Algorithm 1 line by line, quadratic as printed; return the index of each bucket's last tensor.

    The paper counts layers from the input, L first to be ready; here index 0 is ready first, so its l-1 is our i+1.
    `ready[i]` is its tau_b[l] + t_b[l].
    """
    count = len(sizes)
    p = list(sizes)
    comm = [a + b * size for size in sizes]  # lines 4-5
    merged = [False] * count
    start = _calculate_comm_start(comm, ready)  # line 9
    for i in range(count - 1):  # line 10
        if ready[i + 1] - start[i] < a:  # line 11
            comm[i] = 0.0  # MERGE, lines 16-19
            p[i + 1] += p[i]
            comm[i + 1] = a + b * p[i + 1]
            start = _calculate_comm_start(comm, ready)  # line 13
            merged[i] = True  # line 14
    return [i for i in range(count) if not merged[i]]


def _calculate_comm_start(comm: Sequence[float], ready: Sequence[float]) -> list[float]:
    start = [ready[0]]  # line 22
    for i in range(1, len(ready)):  # lines 23-24
        start.append(max(start[i - 1] + comm[i - 1], ready[i]))
    return start


def planner_rows() -> Iterator[dict[str, Any]]:
    """Time each planner on each size; rows come as they are measured."""
    for count in SIZES:
        trace = random_trace(count)
        jobs: dict[str, Callable[[], object]] = {
            "exact": partial(PLANNERS["exact"].buckets, trace, [WAY]),
            "exact, 4 ways": partial(PLANNERS["exact"].buckets, trace, _four_ways()),
            "greedy": partial(PLANNERS["greedy"].buckets, trace, [WAY]),
        }
        if count <= QUADRATIC_UP_TO:
            line = WAY.whole
            arguments = (trace.ready_seconds, trace.nbytes, line.a_seconds, line.b_seconds_per_byte)
            jobs["greedy as printed"] = partial(greedy_ends_as_published, *arguments)
        yield from (_row(name, count, times) for name, times in _interleaved(jobs).items())


def routes() -> dict[str, list[Way]]:
    """Return every way by which a strategy may carry a bucket, by name; and all of them together.

    Dense and coded ones on HiPress's network, whose codec is onebit, sparse ones on gTop-k's.
    """
    dense = [name for name in names("all_reduce") if name != "native"]
    coded = compressed_ways(
        CLUSTERS["hipress-100gbps"], [*dense, *coded_only_names()], ["onebit"], (1, 4), 16, fitted_cost
    )
    sparse = [way_for(CLUSTERS["gtop-k-1gbe"], name, estimate=fitted_cost) for name in sparse_names()]
    ways = [*(way_for(CLUSTERS["hipress-100gbps"], name, estimate=fitted_cost) for name in dense), *coded, *sparse]
    return {str(way.route): [way] for way in ways} | {"all of them": ways}


def pair_rows() -> Iterator[dict[str, Any]]:
    """Time every planner with every route on `PAIRS_TENSORS` tensors."""
    trace = random_trace(PAIRS_TENSORS)
    planners = {name: planner.buckets for name, planner in PLANNERS.items()} | {"batched": plan_batched}
    for route, ways in routes().items():
        jobs = {name: partial(plan, trace, ways) for name, plan in planners.items()}
        times = _interleaved(jobs, repeats=3)
        yield from (_row(f"{name} by {route}", PAIRS_TENSORS, each) for name, each in times.items())


def lane_rows() -> Iterator[dict[str, Any]]:
    """Time what lanes make of the plans of some planners, as `penstock plan --lanes 4 --bulk` does.

    On `PAIRS_TENSORS` tensors, and on the model of most bytes, whose messages have the most instructions.
    """
    for trace in (random_trace(PAIRS_TENSORS), find_trace("bert_large")):
        for workers in (4, 16):
            network = replace(CLUSTERS["hipress-100gbps"], workers=workers)
            ways = comparable(ways_for(network, ["ring"], ["onebit"], [1], workers, fitted_cost))
            for name in LANE_PLANNERS:
                plan = predict(trace, PLANNERS[name], ways, workers)
                job = partial(plans_in_lanes, plan, trace, ways, network, bulk=True)
                times = _interleaved({"lanes": job}, repeats=3)["lanes"]
                yield _row(f"{name} in lanes, {trace.model}, {workers} workers", len(trace.tensors), times)


def slowest(pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of each planner the route that took it longest; the claims have all of them."""
    longest: dict[str, dict[str, Any]] = {}
    for row in sorted(pairs, key=lambda row: float(row["seconds"])):
        longest[row["planner"].split(" by ")[0]] = row
    return list(longest.values())


def claims(pairs: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return that every planner plans by every route within `MOST_SECONDS`, one claim each."""
    return [Claim(f"{row['planner']}, seconds", row["seconds"], MOST_SECONDS, at_most=True) for row in pairs]


def study_row() -> dict[str, Any]:
    """Time the scaling study of ten world sizes and five planners on 600 tensors."""
    planners = [PLANNERS[name] for name in STUDY_PLANNERS]
    trace = random_trace(600)
    job = partial(scaling_study, trace, CLUSTERS["mg-wfbp-simulation"], STUDY_WORKERS, planners, "ring")
    return _row("study of 10 world sizes x 5 planners", 600, _interleaved({"study": job}, repeats=3)["study"])


def _four_ways() -> list[Way]:
    return [Way(f"way{i}", (LinearCost(1e-4 / (i + 1), 10e-6 / 40_000 * (i + 1)),)) for i in range(4)]


def _interleaved(jobs: Mapping[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, list[float]]:
    """Run the jobs in turn, so that a slow moment of the machine falls on all of them."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = perf_counter()
            job()
            times[name].append(perf_counter() - start)
    return times


def _row(name: str, count: int, times: list[float]) -> dict[str, Any]:
    return {"planner": name, "tensors": count, "seconds": median(times), "spread": max(times) - min(times)}


def planning_time(
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Time the planners up to 100,000 tensors, and a 2,048-worker scaling study."""
    total = 3 * len(SIZES) + 2
    rows = list(track(planner_rows(), "planners", total, console=stderr_console(), transient=True))
    pairs, in_lanes = list(pair_rows()), list(lane_rows())
    rows += [*slowest(pairs), *in_lanes, study_row()]
    answers = claim_documents(claims([*pairs, *in_lanes]))
    if out:
        save_record(make_record("planners", rows, claims=answers), out)
    if json:
        print_json({"rows": rows, "claims": answers})
        return
    print_table(
        "planning time on one core",
        ("planner", "tensors", "median", "spread"),
        [(r["planner"], r["tensors"], format_seconds(r["seconds"]), format_seconds(r["spread"])) for r in rows],
    )
    held = sum(answer["holds"] for answer in answers)
    print(f"{held} of {len(answers)} plans within {MOST_SECONDS:g} s, nearly all of {PAIRS_TENSORS:,} tensors")


if __name__ == "__main__":
    start(planning_time)
