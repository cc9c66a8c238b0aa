"""HiPress Fig. 11: does each of its ideas make synchronisation cheaper? Simulated with the published constants.

A bucket passes two stages: its encodes and decodes on the codec's lane, its sends on the network's. The steps:

- default: every tensor by itself, dense;
- on-GPU: every tensor compressed, codec and sends one after the other;
- pipelining: the codec works on one tensor while another travels;
- bulk: tensors are batched by size, in buckets of 25 MiB;
- selective: batches, and whether each is compressed, are chosen together.

Measured steps, on emulated hosts, are in the record of `benchmarks/casync.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from penstock.cost.ways import Way
from penstock.network import LinearCost
from penstock.planners import PLANNERS
from penstock.reproduce.claim import Claim, compare_exactly
from penstock.reproduce.hipress_table_7 import ONEBIT, RATIO, SEND
from penstock.simulator.iteration import simulate_iteration
from penstock.strategies import ring
from penstock.trace import Trace
from penstock.traces import load_shipped

NODES = 16
STEPS = ("default", "on-GPU", "pipelining", "bulk", "selective")
# Section 6.3: cheaper synchronisation than the step before, in percent
PUBLISHED = {"vgg19": (41.2, 7.8, 26.1, 19.9), "bert_base": (10.0, 10.6, 6.6, 7.4)}
_LANES = ("codec", "network")
_WHY = "the baselines fuse small tensors, and ours, which sends each by itself, pays the codec's startup for each"


def figure_11(record: Mapping[str, Any] | None = None) -> list[Claim]:
    """Return the claims for both models, and where a record of `benchmarks/casync.py` is given, what it measured."""
    simulated = [_claim(model, steps_seconds(load_shipped(model)), "simulated") for model in PUBLISHED]
    return [*simulated, *(_measured(record) if record else [])]


def steps_seconds(trace: Trace) -> list[float]:
    """Return the part of the iteration that computation does not hide, step by step."""
    dense, packed = _ways()
    one_by_one, serial = PLANNERS["wfbp"], [packed.one_stage()]
    schedules = [
        (one_by_one.buckets(trace, [dense]), [dense]),
        (one_by_one.buckets(trace, serial), serial),
        (one_by_one.buckets(trace, [packed]), [packed]),
        (PLANNERS["threshold"].buckets(trace, [packed]), [packed]),
        (PLANNERS["joint"].buckets(trace, [dense.one_stage(), *serial]), [dense, packed]),
    ]
    return [simulate_iteration(trace, buckets, ways).non_overlapped_seconds for buckets, ways in schedules]


def _ways() -> tuple[Way, Way]:
    """Return a dense and a compressed ring with the published curves, one piece per node, in two stages."""
    count, share = ring.counts(NODES, NODES), 1 / NODES
    line = LinearCost(count.sends * SEND.startup_seconds, count.sends * share * SEND.seconds_per_byte)
    dense = Way("ring", (LinearCost(0.0, 0.0), line), _LANES)
    calls = count.encodes * ONEBIT.encode.least_seconds + count.decodes * ONEBIT.decode.least_seconds
    work = count.encodes * ONEBIT.encode.seconds_per_byte + count.decodes * ONEBIT.decode.seconds_per_byte
    codec = LinearCost(0.0, share * work)
    sends = replace(line, b_seconds_per_byte=line.b_seconds_per_byte * RATIO)
    return dense, Way("ring", (codec, sends), _LANES, codec="onebit", seconds_per_tensor=calls)


def _claim(model: str, seconds: Sequence[float], how: str) -> Claim:
    """Compare whether every step is faster than the one before; the verdict says by how much."""
    gains = [100 * (1 - after / before) for before, after in pairwise(seconds)]
    ours = ", ".join(f"{name} {gain:+.0f}%" for name, gain in zip(STEPS[1:], gains, strict=True))
    published = ", ".join(f"{name} +{gain:g}%" for name, gain in zip(STEPS[1:], PUBLISHED[model], strict=True))
    ordered = all(gain > 0 for gain in gains)
    losing = [name for name, gain in zip(STEPS[1:], gains, strict=True) if gain <= 0]
    verdict = "matches: every step gains" if ordered else f"differs: {', '.join(losing)} does not gain; {_WHY}"
    return Claim(f"Fig. 11, {model}: what each step saves of the synchronisation", published, ours, how, verdict)


def _measured(record: Mapping[str, Any]) -> list[Claim]:
    """Return, for each place and model of a record, whether the steps are in the paper's order."""
    found = []
    for key in dict.fromkeys((row["hosts"], row["what"]) for row in record["rows"]):
        rows = [row for row in record["rows"] if (row["hosts"], row["what"]) == key]
        seconds = [row["measured_seconds"] for row in rows]
        losing = [
            row["how"] for row, before in zip(rows[1:], seconds, strict=False) if row["measured_seconds"] > before
        ]
        what = f"Fig. 11, {key[1]} on {key[0]} emulated hosts: each step faster than the one before"
        why = f"{', '.join(losing)} is not; all ranks share two cores"
        found.append(compare_exactly(what, "yes", "no" if losing else "yes", "replayed", why))
    return found
