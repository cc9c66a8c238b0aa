"""What each idea of HiPress adds, replayed on emulated hosts: its Fig. 11 as our own table; and `joint` beside others.

Communication and compression are real, computation is waiting as long as the trace says. Ranks measure the network
with all routes that are used, then replay the configurations in turn, and measure again between turns: simulations are
of the machine as it was meanwhile. Configurations with the same plan are replayed once and have the same row. Plans by
`joint` are chosen as in training: up to three that are predicted to take about the same are raced first, in the steps
beside the step before, and the fastest is replayed.

Each row says what bounds it from below: what the encoded bytes take on the wire (`wire_floor_seconds`), and what the
ranks' processes took of the cores that they share (`core_floor_seconds`), each after the first gradients were ready.
The record keeps the networks as they were measured, so that a simulation can be done again.

Steps take turns, so a slow moment of the machine falls on all of them. A step gains where the median of what it takes
less than the step before, turn by turn, is above zero with 97.5% certainty (by the sign test, which knows nothing of
how times are distributed); of records without turns, where it gains more than the spread of its iterations and of those
of the step before. One that has the plan of the step before was not measured again, and gains nothing. Beside how many
simulations are within 5% stands how often a null predictor is, which knows neither codecs nor lanes: the larger of
computation and wire floor.

Hosts of a cluster have processors of their own, ranks of one machine share them: at 1 Gb/s, four hosts on two cores are
bound by the cores. `--slower N` replays in slow motion, as DieCast does (Gupta et al., NSDI 2008): links are N times as
slow, computation waits for N times as long, and times are divided by N. Computing and sending keep their proportion;
codecs, merging and the engine run N times as fast beside them. A host has the processor of one core that is N / (ranks
a core) times as fast against its links, not of so many cores: 4 hosts on 2 cores have one core each, as it is, by
`--slower 2`, 8 hosts by `--slower 4`. Networks are kept as measured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from math import comb
from typing import Annotated, Any

import typer

from configurations import Configuration, hand_made, joint, steps
from penstock.bench.jobs import Done, Place, run_job, serve
from penstock.bench.record import make_record, save_record
from penstock.cli.options import JsonOption, RecordOption, check_routes, parse_counts, split_list
from penstock.cli.output import format_seconds, print_json, print_table, progress
from penstock.cluster.iteration_replay import Gradients, Replay, ReplayRow, replay_plans
from penstock.cluster.topology import parse_rate
from penstock.cost.ways import comparable
from penstock.errors import PenstockError
from penstock.network import Network, network_document
from penstock.plan import Plan, bucket_runs, parse_route
from penstock.planning.observed import Race
from penstock.runtime.communicator import Communicator
from penstock.runtime.measure_network import NATIVE, measure_network
from penstock.runtime.timed import largest
from penstock.runtime.transport import Transport
from penstock.simulator.composition import plans_in_lanes
from penstock.simulator.iteration import predict_robust
from penstock.trace import Trace
from penstock.traces import find_trace
from study import RANK, Claim, claim_documents, print_claims, start

WAIT_SECONDS = 120.0
DENSE = 1  # iterations of what is not compressed: on slow links half a minute each, and they differ by 0.6% at most
WORKER = (__file__, RANK)
_TIMEOUT_SECONDS = 900.0
_DOUBT, _FEWEST_TURNS = 0.025, 6  # with fewer turns nothing is that certain
WITHIN = 0.05  # of what was replayed: how far a simulation may be off
CODECS = "onebit,terngrad(bitwidth=2)"


@dataclass(frozen=True, slots=True)
class CasyncJob:
    """What the ranks are asked to replay."""

    trace: str
    strategy: str  # of compressed buckets, in the steps
    codecs: tuple[str, ...]  # the first one in the steps
    iterations: int  # of each configuration, after one to warm up
    study: str = "steps"  # or "joint": beside the hand-made configurations whose names are in `only`
    seconds_per_route: float = 3.0  # of measuring; more hosts on the same cores take longer
    only: int = 4  # how many of the best-predicted hand-made configurations are replayed too
    slower: float = (
        1.0  # in slow motion: the computation takes so many times as long, as messages do on the slower links
    )

    def configurations(self, hosts: int) -> list[Configuration]:
        """Return all that may be replayed."""
        if self.study == "steps":
            return steps(self.strategy, self.codecs[0], hosts)
        return [*hand_made(NATIVE, self.codecs), joint(NATIVE, self.codecs)]


def measure_job(transport: Transport, job: CasyncJob, done: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield a row for every replayed configuration; every rank must call this with the same job."""
    hosts, trace = transport.world_size, find_trace(job.trace)
    trace = trace.computing(job.slower * trace.compute_seconds)
    found = job.configurations(hosts)
    network = _measured(transport, job, trace, list(dict.fromkeys(route for each in found for route in each.routes)))
    communicator = Communicator(transport, timeout_seconds=job.slower * WAIT_SECONDS)
    *hand, chosen = found
    plans = {each.name: _in_lanes(each, each.plan(trace, network), trace, network)[0] for each in hand}
    if job.study == "joint":
        quickest = sorted(plans, key=lambda name: plans[name].iteration_seconds)[: job.only]
        plans = {name: plan for name, plan in plans.items() if name in quickest}
    robust = predict_robust(trace, chosen.planner, comparable(chosen.ways(network)), hosts)
    rivals = _in_lanes(chosen, robust, trace, network)
    if job.study == "steps":  # the step before is one of its choices
        rivals += [replace(plans[hand[-1].name].merged, planner=rivals[0].planner)]
    plans[chosen.name] = fastest_plan(trace, _different(rivals), communicator)
    lanes = {each.name: each.lanes for each in found}
    networks = [network]

    def measure_again() -> Network:
        """Measure the codecs, and the compressed routes that are replayed."""
        used = dict.fromkeys(str(bucket.route) for plan in plans.values() for bucket in plan.buckets if bucket.codec)
        now = _measured(transport, job, trace, list(used))
        networks.append(replace(network, all_reduce={**network.all_reduce, **now.all_reduce}, codecs=now.codecs))
        return networks[-1]

    alike = {name: (plan.merged.hash, lanes[name]) for name, plan in plans.items()}  # what does the same is run once
    only = {key: name for name, key in reversed(alike.items())}
    dense = [name for name in only.values() if not any(bucket.codec for bucket in plans[name].buckets)]
    packed = [name for name in only.values() if name not in dense]
    rows: dict[str, ReplayRow] = {}  # dense ones take long, and differ little from one iteration to the next
    for some, count, again in ((dense, DENSE, None), (packed, job.iterations, measure_again)):
        wanted = {name: plans[name] for name in some}
        timed, _ = replay_plans(
            trace, wanted, network, communicator, count, lambda: done(job.trace), lanes, again, record=False
        )
        rows |= dict(zip(some, timed, strict=True))
    yield {"networks": [network_document(each) for each in networks], "trace": job.trace}
    for name, plan in plans.items():
        row = rows[only[alike[name]]]
        document = row.document()
        document.pop("planner")
        document |= {
            "network": document["network"] + (only[alike[name]] in packed),
            "lanes": lanes[name],
        }  # the first: before all
        document |= {"buckets": bucket_runs(plan), "turns_seconds": list(row.turns)}
        yield {"what": job.trace, "how": name, **_told(plan, trace, network), **document} | _floors(
            plan, trace, network, row.core_seconds
        )


def _measured(transport: Transport, job: CasyncJob, trace: Trace, routes: Sequence[str]) -> Network:
    """Return the network with the lines of these routes, and their codecs' curves."""
    codecs = list(dict.fromkeys(codec for route in routes if (codec := parse_route(route).codec)))
    seconds = job.seconds_per_route * len(routes) * max(1.0, transport.world_size / 4)
    whole = sum(trace.nbytes)
    return measure_network(transport, seconds=seconds, strategies=routes, codecs=codecs, whole_nbytes=whole).network


def _different(plans: Sequence[Plan]) -> list[Plan]:
    return list({plan.hash: plan for plan in reversed(plans)}.values())[::-1]


def _told(plan: Plan, trace: Trace, network: Network) -> dict[str, Any]:
    """Return what a plan sends, in words and numbers."""
    packed = sum(bucket.nbytes for bucket in plan.buckets if bucket.codec is not None)
    routes = ", ".join(dict.fromkeys(str(bucket.route) for bucket in plan.buckets))
    return {"routes": routes, "compressed_share": packed / max(1, sum(trace.nbytes))}


def _floors(plan: Plan, trace: Trace, network: Network, core_seconds: float) -> dict[str, float]:
    """Return what an iteration takes at least: its bytes on the wire, and its processor time on the shared cores."""
    sent = 2 * (plan.workers - 1) / plan.workers
    ratios = {name: curves.ratio for name, curves in network.codecs.items()}
    nbytes = sum(bucket.nbytes * ratios.get(str(bucket.codec), 1.0) for bucket in plan.buckets)
    ready = trace.ready_seconds[0]
    return {
        "wire_floor_seconds": ready + sent * nbytes * network.beta_seconds_per_byte,
        "core_floor_seconds": ready + core_seconds * network.ranks_per_core,
    }


def _in_lanes(made: Configuration, plan: Plan, trace: Trace, network: Network) -> list[Plan]:
    """Return a configuration's plan, timed and, by planners that choose, planned for its lanes, and its rivals."""
    found = plans_in_lanes(plan, trace, comparable(made.ways(network)), network, made.lanes, bulk=made.bulk)
    return [found.plan, *found.rivals]


def fastest_plan(trace: Trace, plans: Sequence[Plan], communicator: Communicator) -> Plan:
    """Race plans as training does, on replayed iterations, and return the fastest; every rank must call this."""
    gradients, race = Gradients(trace), Race(tuple(plans))
    replays = {plan.hash: Replay(trace, plan, communicator, gradients) for plan in plans}
    start_together = partial(largest, communicator.transport, 0.0, communicator.timeout_seconds)
    try:
        for replay in replays.values():
            replay.run(start_together)
        while not race.is_over:
            seconds = replays[race.current.hash].run(start_together).iteration_seconds
            race.note(largest(communicator.transport, seconds, communicator.timeout_seconds))
    finally:
        for replay in replays.values():
            replay.close()
    return race.plans[race.fastest]


def casync_rows(place: Place, job: CasyncJob, done: Done, networks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Measure the job at a place; each row says how much faster it is than the one before it and than the first.

    The network as it was measured is added to `networks`. In slow motion a place's links are so much slower than they
    say, and times in the rows as much shorter than they were.
    """
    before = first = None
    where = {"hosts": place.hosts, "rate": place.rate} | ({"slower": job.slower} if job.slower != 1 else {})
    for row in run_job(
        _slowed(place, job.slower), WORKER, asdict(job), partial(_tell, done, place), job.slower * _TIMEOUT_SECONDS
    ):
        if "networks" in row:
            networks.append({**where, **row})
            continue
        times = {name: value for name, value in row.items() if name.endswith("_seconds") or name == "spread"}
        turns = [value / job.slower for value in times.pop("turns_seconds", ())]
        row |= {name: value / job.slower for name, value in times.items()} | {"turns_seconds": turns}
        seconds = row["measured_seconds"]
        first = first or seconds
        gain = {"times_as_fast_as_before": (before or seconds) / seconds} if job.study == "steps" else {}
        yield {**where, **row, **gain, "times_as_fast": first / seconds}
        before = seconds


def _slowed(place: Place, slower: float) -> Place:
    """Return the place with links so many times slower."""
    bits_per_second = parse_rate(place.rate)
    if slower == 1 or bits_per_second is None:
        return place
    return replace(place, rate=f"{bits_per_second / slower:.0f}bit")


def _tell(done: Done, place: Place, what: str) -> None:
    done(f"{place.hosts} hosts at {place.rate}, {what}")


def casync(
    hosts: Annotated[str, typer.Option(help="numbers of emulated hosts")] = "4",
    rate: Annotated[str, typer.Option(help="of each NIC")] = "1gbit",
    traces: Annotated[str, typer.Option(help="what to replay, each with the strategy of its buckets")] = (
        "vgg16:ring,bert_base:ring"
    ),
    codecs: Annotated[str, typer.Option(help="compressors; the first one in the steps of Fig. 11")] = CODECS,
    study: Annotated[str, typer.Option(help="steps (Fig. 11), or joint: beside the best hand-made ones")] = "steps",
    iterations: Annotated[int, typer.Option(help="of each configuration, after one to warm up", min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="to measure each route in, each of four times")] = 3.0,
    slower: Annotated[float, typer.Option(help="slow motion: times as slow as it is told", min=1.0)] = 1.0,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Replay stock, + codec, + pipelining, + bulk, + selective on emulated hosts. Needs root."""
    jobs = [
        replace(_job(each, split_list(codecs), iterations, study, seconds), slower=slower) for each in traces.split(",")
    ]
    places = [Place(count, rate) for count in parse_counts(hosts, "--hosts")]
    total = len(places) * len(jobs) * 5 * (iterations + 1)
    with progress("casync", total) as done:
        networks: list[dict[str, Any]] = []
        rows = [row for place in places for job in jobs for row in casync_rows(place, job, done, networks)]
    answers = claim_documents(claims(rows, study))
    if out:
        name = "casync" if study == "steps" else "joint_replayed"
        save_record(make_record(name, rows, claims=answers, networks=networks), out)
    if json:
        print_json({"rows": rows, "claims": answers})
    else:
        _print(rows)
        print_claims(answers)


def claims(rows: Sequence[Mapping[str, Any]], study: str) -> list[Claim]:
    """Return what the rows are asked to show: each step gains, joint is no slower than its parts, simulations hold."""
    found = []
    for (hosts, what), group in groupby(rows, key=lambda row: (row["hosts"], row["what"])):
        here = list(group)
        if study == "steps":
            text = f"{what} on {hosts} hosts, {{}}: times as fast as the step before, at least"
            pairs = [(last, now) for last, now in pairwise(here) if verdict(last, now) != "once"]
            values = (1 + least_gain(last, now) / now["measured_seconds"] for last, now in pairs)
            found += [Claim(text.format(now["how"]), value, 1.0) for (_, now), value in zip(pairs, values, strict=True)]
        else:
            best = min(row["measured_seconds"] for row in here[:-1])
            text = f"{what} on {hosts} hosts: joint over the best of its parts"
            found.append(Claim(text, here[-1]["measured_seconds"] / best, 1.0, at_most=True))
    count, close, null = simulated(rows)
    text = f"settings with codecs simulated within {WITHIN:.0%} of replayed ({null} by the null predictor)"
    return [*found, Claim(text, close, count)]


def spread_of(last: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """Return the larger spread of two rows; 0 where each was measured once, so that none is known."""
    return max(float(last["spread"]), float(now["spread"]))


def is_copied(last: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Say whether two rows are one measurement, of one plan that both configurations have."""
    return all(last[name] == now[name] for name in ("what", "measured_seconds", "spread", "simulated_seconds"))


def verdict(last: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what a step does: `gains` or `loses` for certain, neither (`within`), `same` plan, or measured `once`."""
    if is_copied(last, now):
        return "same"
    if not spread_of(last, now):
        return "once"
    return "gains" if least_gain(last, now) > 0 else "loses" if least_gain(now, last) > 0 else "within"


def least_gain(last: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """Return how many seconds less the second of two rows takes at least: what it loses at most is below zero."""
    turns = [row.get("turns_seconds", ()) for row in (last, now)]
    if min(map(len, turns)) >= _FEWEST_TURNS:
        return least_median([before - after for before, after in zip(*turns, strict=True)])
    return float(last["measured_seconds"] - now["measured_seconds"]) - spread_of(last, now)


def least_median(values: Sequence[float]) -> float:
    """Return what the median of many more such values is above, with a certainty of 97.5%; there are six at least.

    Each of n values is below the median as often as heads come up: the k-th smallest of them is above it only where
    fewer than k coins of n do.

    >>> least_median([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]), least_median([float(value) for value in range(15)])
    (1.0, 3.0)
    """
    count, below = len(values), 0.0
    for place, value in enumerate(sorted(values)):
        below += comb(count, place) / 2**count
        if below + comb(count, place + 1) / 2**count > _DOUBT:
            return value
    raise AssertionError("half of all values are below their median")


def simulated(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int, int]:
    """Return how many settings with codecs were measured, and how many the simulator and the null predictor hit.

    A plan that several configurations have was measured once, and counts once. Where a record has no wire floor, the
    null predictor misses.
    """
    packed = [row for row in rows if row["compressed_share"]]
    distinct = [row for at, row in enumerate(packed) if not any(is_copied(each, row) for each in packed[:at])]
    close = sum(abs(row["error"]) <= WITHIN for row in distinct)
    null = sum(abs(null_seconds(row) / row["measured_seconds"] - 1) <= WITHIN for row in distinct)
    return len(distinct), close, null


def null_seconds(row: Mapping[str, Any]) -> float:
    """Return what an iteration would take by its computation, or by its bytes on the wire, whichever is longer."""
    return max(find_trace(row["what"]).compute_seconds, float(row.get("wire_floor_seconds", 0.0)))


def _job(text: str, codecs: list[str], iterations: int, study: str, seconds: float) -> CasyncJob:
    if study not in ("steps", "joint"):
        raise PenstockError(f"--study: found {study!r}; wanted steps or joint")
    trace, _, strategy = text.partition(":")
    find_trace(trace)
    check_routes(f"{strategy or 'ring'}+{codec}" for codec in codecs)
    return CasyncJob(trace, strategy or "ring", tuple(codecs), iterations, study, seconds)


def _print(rows: list[dict[str, Any]]) -> None:
    print_table(
        "replayed on emulated hosts",
        (
            *("hosts", "what", "how", "messages", "compressed", "measured", "spread", "times as fast"),
            *("wire floor", "core floor", "simulated", "error"),
        ),
        [
            (
                *(row[name] for name in ("hosts", "what", "how", "messages")),
                f"{100 * row['compressed_share']:.0f}%",
                *(format_seconds(row[name]) for name in ("measured_seconds", "spread")),
                f"{row['times_as_fast']:.2f}",
                *(format_seconds(row[f"{name}_floor_seconds"]) for name in ("wire", "core")),
                format_seconds(row["simulated_seconds"]),
                f"{100 * row['error']:+.1f}%",
            )
            for row in rows
        ],
    )


def _rank() -> None:
    serve(lambda document: CasyncJob(**document | {"codecs": tuple(document["codecs"])}), measure_job)


if __name__ == "__main__":
    start(casync, _rank)
