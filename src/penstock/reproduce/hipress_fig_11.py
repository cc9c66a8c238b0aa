"""HiPress Fig. 11 and 12b: what each of its ideas saves of the synchronisation, with the published constants.

A bucket passes two stages: its encodes and decodes on the codec's lane, its sends on the network's. The steps:

- default: every tensor by itself, dense;
- on-CPU: every tensor compressed by a processor, 35.6 times slower than by a GPU (section 4.4);
- on-GPU: every tensor compressed, codec and sends one after the other;
- pipelining: the codec works on one tensor while another travels;
- bulk: tensors are batched by size, in buckets of 25 MiB;
- selective: batches, and whether each is compressed, are chosen together.

Gains are compared with the printed ones, number by number. They do not come out: the curves are a V100's on 100 Gb/s,
the figure is of GTX 1080 Ti on 56 Gb/s, and the layer times are our H200's.
"""

from collections.abc import Iterator
from dataclasses import replace

from penstock.cost.ways import Way
from penstock.curves import CodecCurves, Curve
from penstock.network import LinearCost
from penstock.planners import PLANNERS
from penstock.reproduce.claim import Claim, check_printed, check_statement, not_here
from penstock.reproduce.hipress_table_7 import ONEBIT, SEND
from penstock.simulator.iteration import simulate_iteration
from penstock.strategies import ring
from penstock.trace import Trace
from penstock.traces import load_shipped

NODES = 16
CPU_SLOWDOWN = 35.6  # section 4.4: onebit's encode on a processor
# Section 6.3: how much cheaper than the step before; on-CPU and on-GPU than the default
PUBLISHED = {
    "vgg19": {"on-CPU": "-32.2%", "on-GPU": "41.2%", "pipelining": "7.8%", "bulk": "26.1%", "selective": "19.9%"},
    "bert_base": {"on-GPU": "10.0%", "pipelining": "10.6%", "bulk": "6.6%", "selective": "7.4%"},
}
BEFORE = {"on-CPU": "default", "on-GPU": "default", "pipelining": "on-GPU", "bulk": "pipelining", "selective": "bulk"}
TERNGRAD = {2: "", 4: "12.8%", 8: "23.6%"}  # Fig. 12b: slower than with 2 bits
_LANES = ("codec", "network")
_WHY = "curves of a V100 on 100 Gb/s and layer times of an H200, not a GTX 1080 Ti on 56 Gb/s"
_WHY_12B = f"{_WHY}; onebit's curves stand for TernGrad's, whose are not published"


def figure_11() -> Iterator[Claim]:
    """Compare every step's gain with the printed one; whether each gains at all is a claim of its own."""
    for model, published in PUBLISHED.items():
        seconds = steps_seconds(load_shipped(model))
        gains = {step: 100 * (1 - seconds[step] / seconds[BEFORE[step]]) for step in published}
        for step, printed in published.items():
            what = f"Fig. 11, {model}: synchronisation that {step} saves against {BEFORE[step]}"
            yield check_printed(what, printed, gains[step], "simulated", _WHY)
        losing = [step for step, gain in gains.items() if (gain > 0) != (step != "on-CPU")]
        words = f"{', '.join(losing)} does not; our default sends every tensor by itself, theirs fuses small ones"
        what = f"Fig. 11, {model}: every step on the GPU gains, on-CPU loses"
        yield check_statement(what, not losing, "simulated", words)
    yield not_here("Fig. 11, bert_base: on-CPU", "the paper has none: its Ring works on GPUs only")


def steps_seconds(trace: Trace) -> dict[str, float]:
    """Return the part of the iteration that computation does not hide, by step."""
    dense, packed = ways(ONEBIT)
    encode, decode = (_slower(curve, CPU_SLOWDOWN) for curve in (ONEBIT.encode, ONEBIT.decode))
    _, on_cpu = ways(replace(ONEBIT, encode=encode, decode=decode))
    one_by_one, serial, slow = PLANNERS["wfbp"], [packed.one_stage()], [on_cpu.one_stage()]
    schedules = {
        "default": (one_by_one.buckets(trace, [dense]), [dense]),
        "on-CPU": (one_by_one.buckets(trace, slow), slow),
        "on-GPU": (one_by_one.buckets(trace, serial), serial),
        "pipelining": (one_by_one.buckets(trace, [packed]), [packed]),
        "bulk": (PLANNERS["threshold"].buckets(trace, [packed]), [packed]),
        "selective": (PLANNERS["joint"].buckets(trace, [dense.one_stage(), *serial]), [dense, packed]),
    }
    return {
        step: simulate_iteration(trace, buckets, chosen).non_overlapped_seconds
        for step, (buckets, chosen) in schedules.items()
    }


def figure_12b() -> Iterator[Claim]:
    """TernGrad with 4 and 8 bits: how much longer an iteration of VGG-19 is than with 2, all chosen by `joint`."""
    trace = load_shipped("vgg19")
    seconds = {}
    for bits in TERNGRAD:
        dense, packed = ways(replace(ONEBIT, ratio=bits / 32))
        single = [dense.one_stage(), packed.one_stage()]
        buckets = PLANNERS["joint"].buckets(trace, single)
        seconds[bits] = simulate_iteration(trace, buckets, [dense, packed]).iteration_seconds
    for bits, printed in TERNGRAD.items():
        if printed:
            what = f"Fig. 12b, VGG19, TernGrad: speed lost with {bits} bits against 2"
            yield check_printed(what, printed, 100 * (1 - seconds[2] / seconds[bits]), "simulated", _WHY_12B)


def ways(codec: CodecCurves) -> tuple[Way, Way]:
    """Return a dense and a compressed ring with the published curves, one piece per node, in two stages."""
    count, share = ring.counts(NODES, NODES), 1 / NODES
    line = LinearCost(count.sends * SEND.startup_seconds, count.sends * share * SEND.seconds_per_byte)
    dense = Way("ring", (LinearCost(0.0, 0.0), line), _LANES)
    calls = count.encodes * codec.encode.least_seconds + count.decodes * codec.decode.least_seconds
    work = count.encodes * codec.encode.seconds_per_byte + count.decodes * codec.decode.seconds_per_byte
    sends = replace(line, b_seconds_per_byte=line.b_seconds_per_byte * codec.ratio)
    packed = Way("ring", (LinearCost(0.0, share * work), sends), _LANES, codec="onebit", seconds_per_tensor=calls)
    return dense, packed


def _slower(curve: Curve, factor: float) -> Curve:
    return Curve(factor * curve.seconds_per_byte, factor * curve.startup_seconds, factor * curve.floor_seconds)
