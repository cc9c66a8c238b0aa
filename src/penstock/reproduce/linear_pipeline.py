"""Linear pipeline (Wang, Vuduc et al.): every cell of Table 1, Eq. 2-3, Fig. 2 to 4, Table 2 and section 4.2.

The three BSP-SGD algorithms of section 3.3 are timed on one trace, in the steady state.
Without overlap (Algorithms 2 and 3) an iteration is computation, then communication. With overlap (Algorithm 1) the
gradients of a layer are reduced during the backward pass of the layers below it, and its weights are broadcast during
the forward pass of the layers before it; an iteration then begins before the last one's weights have all arrived, so
several are simulated in a row and the distance between two of them counts.

    compute  |F1 F2 F3|B3 B2 B1|  |F1 F2 F3|
    network  |b2 b3|      r3 r2 r1 b1 b2 b3|      b: broadcast of weights, r: reduce of gradients

A trace has one forward time for the whole model; a layer's share is taken to be that of its backward time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import log2
from typing import Any

from penstock.network import LinearCost, Network
from penstock.reproduce.architectures import alexnet
from penstock.reproduce.claim import (
    Claim,
    check_equal,
    check_number,
    check_printed,
    check_statement,
    compare_measured,
    compare_own,
    measured_rows,
    not_here,
    rounded,
)
from penstock.simulator.engine import Task, run_tasks
from penstock.simulator.program import count_steps, program_seconds
from penstock.strategies import Options, build, linear_pipeline
from penstock.trace import Trace
from penstock.traces import load_shipped

# Section 3.2: latency 1e-7 s and 1e9 bytes/s, blocks of 64 KB. No gamma is given: a tenth of beta, to see its terms.
NETWORK = Network(workers=4, alpha_seconds=1e-7, beta_seconds_per_byte=1e-9, gamma_seconds_per_byte=1e-10)
RANKS = 4
BLOCK = 64 * 1024
NBYTES = 16 * BLOCK  # of Table 1's rows: the paper fixes none
LARGE = 16 << 20  # bytes, for what holds of long messages


@dataclass(frozen=True, slots=True)
class Model:
    """What Table 2 and section 4.2 print of one, on 4 GPUs: "Alg. 1" there is reduce and broadcast."""

    mbytes: int
    comm: str  # seconds of communication by MST
    compt: str  # seconds of computation
    share: str  # of communication in the iteration
    comm_over_be: str  # communication of LP, by BE's
    comm_over_mst: str
    over_be: str  # speed with LP, by that with BE
    over_mst: str
    overlapped_over_be: str  # speed of "Alg. 3" with LP


MODELS = {
    "AlexNet": Model(256, "0.77", "0.92", "45.5%", "10%", "11%", "1.91x", "1.74x", "2.12x"),
    "GoogLeNet": Model(51, "0.046", "0.267", "14.7%", "6%", "43%", "1.6x", "1.1x", "2.19x"),
}
RESYNC_EVERY = 5  # iterations between two broadcasts of the weights in Algorithm 3
_ITERATIONS = 4  # simulated in a row; the last two are a steady state apart
_COMPUTE, _NETWORK = "compute", "network"
Cost = Callable[[float], float]  # seconds for a number of bytes
_SPLIT = ("reduce", "broadcast")
_MOST_BLOCKS = 512  # of a simulated model: filling the pipe is below 1% of it, as with the paper's blocks of 64 KB
_FILLING = (
    "the formula counts p-1+n/b blocks where Fig. 2 has p-2+n/b, and all sums, though a block's overlaps the next "
    "one's way; counted as in Fig. 2 it is ours"
)
_HOST = (
    "its formulas allow about 2x ('in theory'), and section 4.1 measured 2.3x to 360.55x: there OpenMPI sums in host "
    "memory, and MST sums a message once all of it has come; neither is in a formula"
)
_SCATTER = "the program gathers by doubling, in log p startups; the formula's all-gather has p-1"


def claims() -> list[Claim]:
    """Return every claim."""
    return [
        *_steps(),
        *_table_1(),
        *_limits(),
        not_here("fig-3", "Fig. 3, LP over BE and MST on 4 K40m", "those GPUs, OpenMPI moving data through the host",
                 "29.2x, 2.3x; 360.55x, 8.7x; 109.2x, 7.9x"),
        *_figure_4(),
        *_sizes(),
        not_here("table-2", "Table 2, the columns of BE and LP", "not legible in the text that we have"),
        not_here("fig-5", "Fig. 5, training losses on 4 K40m", "ImageNet is not here; curves without printed numbers"),
        *_algorithms(),
        *(claim for name, model in MODELS.items() for claim in _training(name, model)),
        *(claim for name, model in MODELS.items() for claim in _own(name, model)),
        *_text(),
        *_measured(),
    ]  # fmt: skip


def _steps() -> list[Claim]:
    """Fig. 2: four blocks on three GPUs."""
    blocks = Options(block_numel=100)
    all_reduce, reduce, broadcast = (
        count_steps(build(operation, "linear_pipeline", 3, 400, blocks))
        for operation in ("all_reduce", "reduce", "broadcast")
    )
    how = "counted in the program"
    return [
        check_equal("fig-2c", "Fig. 2c: steps of an all-reduce of 4 blocks on 3 GPUs", 9, all_reduce, how),
        check_equal("section-3", "section 3: steps of reduce and then broadcast", 10, reduce + broadcast, how),
    ]


def printed_seconds(operation: str, strategy: str, network: Network, p: int, n: int, b: int) -> float:
    """Return a cell of Table 1, as printed, of n bytes on p ranks in blocks of b; two printing errors mended (see
    docs/papers.md)."""
    alpha, beta, gamma = network.alpha_seconds, network.beta_seconds_per_byte, network.gamma_seconds_per_byte
    log, part = log2(p), (p - 1) / p * n
    cells = {
        ("broadcast", "bidirectional_exchange"): (log + p - 1) * alpha + 2 * part * beta,
        ("broadcast", "spanning_tree"): log * (alpha + n * beta),
        ("broadcast", "linear_pipeline"): (p - 1 + n / b) * alpha + (b * (p - 1) + n) * beta,
        ("reduce", "bidirectional_exchange"): 2 * log * alpha + 2 * part * beta + part * gamma,
        ("reduce", "spanning_tree"): log * (alpha + n * beta + n * gamma),
        ("reduce", "linear_pipeline"): (p - 1 + n / b) * alpha + (b * p - b + n) * (beta + gamma),
        ("all_reduce", "bidirectional_exchange"): 2 * log * alpha + 2 * part * beta + part * gamma,
        ("all_reduce", "spanning_tree"): log * (2 * alpha + 2 * n * beta + n * gamma),
        ("all_reduce", "linear_pipeline"): 2 * (p - 1 + n / b) * alpha + (b * p - b + n) * (2 * beta + gamma),
    }
    return cells[operation, strategy]


def pipelined_seconds(operation: str, network: Network, p: int, n: int, b: int) -> float:
    """Return what Table 1's pipelines take with the steps of Fig. 2, where n/b is at least 2p."""
    steps, sums = {
        "broadcast": (p - 2 + n / b, 0),
        "reduce": (p - 2 + n / b, p - 1),
        "all_reduce": (p - 2 + 2 * n / b, p - 2),
    }[operation]
    step = network.alpha_seconds + b * network.beta_seconds_per_byte
    return steps * step + sums * b * network.gamma_seconds_per_byte


def _simulated(
    operation: str, strategy: str, ranks: int = RANKS, nbytes: int = NBYTES, block_nbytes: int | None = None
) -> float:
    options = Options(block_numel=(block_nbytes or BLOCK) // 4)
    return program_seconds(build(operation, strategy, ranks, nbytes // 4, options), NETWORK)


def _table_1() -> Iterator[Claim]:
    """Table 1's nine formulas against the programs themselves, on 4 ranks and 1 MiB."""
    for operation in ("broadcast", "reduce", "all_reduce"):
        for strategy in ("bidirectional_exchange", "spanning_tree", "linear_pipeline"):
            what = f"Table 1, {operation} by {strategy}, 4 ranks, 1 MiB (s)"
            printed = printed_seconds(operation, strategy, NETWORK, RANKS, NBYTES, BLOCK)
            ours, why = _simulated(operation, strategy), _FILLING if strategy == "linear_pipeline" else _SCATTER
            yield check_number(f"table-1/{operation}/{strategy}", what, printed, ours, "simulated program", why)


def _limits() -> list[Claim]:
    """Eq. 2 and 3: a pipelined broadcast is up to 2 and up to log p times faster; Fig. 3's text says 2.0x for both."""
    pipeline, exchange, tree = (
        _simulated("broadcast", name, nbytes=LARGE)
        for name in ("linear_pipeline", "bidirectional_exchange", "spanning_tree")
    )
    be, mst, how = exchange / pipeline, tree / pipeline, "simulated programs"
    return [
        check_statement("eq-2", "Eq. 2, 4 GPUs, 16 MiB: LP is faster than BE, less than 2 times", 1 < be < 2, how,
                        f"{be:.3f}", "it is not"),
        check_statement("eq-3", "Eq. 3, 4 GPUs, 16 MiB: LP is faster than MST, less than log p times", 1 < mst < 2, how,
                        f"{mst:.3f}", "it is not"),
        check_printed("section-4.1", "section 4.1: broadcast by MST over LP, 4 GPUs, 16 MiB", "2.0x", mst, how,
                      source="'the 2.0x theoretical prediction'"),
    ]  # fmt: skip


def _figure_4() -> list[Claim]:
    """MST's steps on 2 to 6 GPUs; the pipeline's time does not grow with them."""
    steps = [count_steps(build("broadcast", "spanning_tree", p, 16)) for p in (2, 3, 4, 5, 6)]
    pipeline, exchange = (
        _simulated("broadcast", name, 8, LARGE) / _simulated("broadcast", name, 2, LARGE)
        for name in ("linear_pipeline", "bidirectional_exchange")
    )
    how, invariant = "simulated programs", "'both the cost of LP and BE are invariant to the GPU count p', as a ratio"
    why = "by its own Table 1 it takes 2 (p-1)/p n beta: n beta on two GPUs, nearly twice that on many"
    return [
        check_equal("fig-4", "Fig. 4, steps of MST on 2 to 6 GPUs", [1, 2, 2, 3, 3], steps, "counted in the program"),
        check_printed("section-3.2", "section 3.2: broadcast by LP on 8 GPUs over 2, 16 MiB", "1.0x", pipeline, how,
                      source="'8 GPUs may cost same to 2 GPUs', as a ratio; its digits are ours"),
        check_printed("fig-4/be", "section 4.1: broadcast by BE on 8 GPUs over 2, 16 MiB", "1.0x", exchange, how, why,
                      source=invariant),
    ]  # fmt: skip


def numel_of(model: str) -> int:
    """Return the parameters of a model of Table 2, AlexNet's as Caffe has it."""
    return sum(alexnet()) if model == "AlexNet" else sum(tensor.numel for tensor in load_shipped("googlenet").tensors)


def _sizes() -> Iterator[Claim]:
    why = "61.0 million parameters are 233 MB of 2^20 bytes, 244 of 10^6"
    for name, model in MODELS.items():
        what, mbytes = f"Table 2, {name}: MB of its parameters", 4 * numel_of(name) / 2**20
        yield check_printed(f"table-2/{name}", what, str(model.mbytes), mbytes, "counted", why)


def _algorithms() -> list[Claim]:
    """Section 4.2: overlapped before all-reduce before reduce and broadcast.

    Layers and their shares of the computation are our GoogLeNet trace's; together they take Table 2's 0.267 s.

    Its numbers differ from section 3.3's: "Alg. 3", of cost max(comm, compt), is the overlapped one printed as
    Algorithm 1, "Alg. 1" is reduce and broadcast, printed as Algorithm 2.
    """
    trace = load_shipped("googlenet").computing(float(MODELS["GoogLeNet"].compt))
    costs = Costs(*(_cost(operation) for operation in ("reduce", "broadcast", "all_reduce")))
    overlapped, split = layers_seconds(trace, costs), reduce_broadcast_seconds(trace, costs)
    joined = all_reduce_seconds(trace, costs)
    why = "both send every byte twice; weights again every 5th time cost more than filling the pipe once saves"
    how, times = "iteration simulated, collectives by Table 1", f"{overlapped:.3f}, {joined:.3f}, {split:.3f} s"
    first = overlapped < min(split, joined)
    return [
        check_statement("section-4.2/overlap", "section 4.2: overlapping beats both others", first, how, times,
                        "it does not"),
        check_statement("section-4.2/all-reduce", "section 4.2: all-reduce beats reduce and broadcast", joined < split,
                        how, times, why),
    ]  # fmt: skip


def _training(name: str, model: Model) -> list[Claim]:
    """Section 4.2's numbers, with simulated programs of one message and the printed seconds of computation."""
    nbytes = model.mbytes * 1_000_000
    lp, be, mst = (
        sum(_simulated(operation, strategy, RANKS, nbytes, nbytes // _MOST_BLOCKS) for operation in _SPLIT)
        for strategy in ("linear_pipeline", "bidirectional_exchange", "spanning_tree")
    )
    compute = float(model.compt)
    speeds = ((be + compute) / (lp + compute), (mst + compute) / (lp + compute))
    how, key, why = "simulated programs", f"section-4.2/{name}", _HOST
    return [
        check_printed(f"{key}/communication", f"section 4.2, {name}: communication of LP, of BE's and of MST's",
                      (model.comm_over_be, model.comm_over_mst), (100 * lp / be, 100 * lp / mst), how, why),
        check_printed(f"{key}/speed", f"section 4.2, {name}: speed by LP over BE and over MST",
                      (model.over_be, model.over_mst), speeds, how, why),
        check_printed(f"{key}/overlapped", f"section 4.2, {name}: overlapped LP over BE", model.overlapped_over_be,
                      (be + compute) / max(lp, compute), how, why, source="its cost: max(comm, compt)"),
    ]  # fmt: skip


def _own(name: str, model: Model) -> Iterator[Claim]:
    """Compare section 4.2's speeds with Table 2's seconds and section 4.2's shares."""
    corners = list(product(*(rounded(text) for text in (model.comm, model.compt))))
    shares = [100 * comm / (comm + compt) for comm, compt in corners]
    yield compare_own(f"own/{name}/share", f"Table 2, {name}: MST's communication, of its iteration", model.share,
                      [(min(shares), max(shares))], "computed from its seconds")  # fmt: skip
    texts = (model.comm, model.compt, model.comm_over_be, model.comm_over_mst)
    over_be, over_mst, overlapped = list[float](), list[float](), list[float]()
    for comm, compt, of_be, of_mst in product(*(rounded(text) for text in texts)):
        lp = comm * of_mst / 100
        be = lp / (of_be / 100)
        over_be.append((be + compt) / (lp + compt))
        over_mst.append((comm + compt) / (lp + compt))
        overlapped.append((be + compt) / max(lp, compt))
    yield compare_own(
        f"own/{name}/speeds",
        f"section 4.2, {name}: speed by LP over BE and MST, overlapped LP over BE, from shares and Table 2",
        (model.over_be, model.over_mst, model.overlapped_over_be),
        [(min(each), max(each)) for each in (over_be, over_mst, overlapped)],
        "computed",
        "the shares give other speeds, by the same comm + compt",
    )


def _text() -> Iterator[Claim]:
    """Compare what the introduction says of GoogLeNet, and section 3.2 of AlexNet, with section 4.2 and Table 2."""
    what = "introduction: training GoogLeNet with LP, 'up to 1.7x' over MST, from section 4.2"
    why = "1.74x is AlexNet's; 'on 6 GPUs' there is 'on 4 K40m' in section 4.1, with the same 2.3x to 360.55x"
    yield compare_own("own/introduction", what, "1.7x", [rounded(MODELS["GoogLeNet"].over_mst)], "compared", why)
    what, size = "section 3.2: 'AlexNet is 50 MegaBytes', from Table 2", float(MODELS["AlexNet"].mbytes)
    yield compare_own("own/section-3.2", what, "50", [(size, size)], "compared", "50 MB are GoogLeNet's")


def _cost(operation: str) -> Cost:
    """Return what a pipelined collective costs; a message shorter than a block is one block."""
    functions = {
        "broadcast": linear_pipeline.broadcast_cost,
        "reduce": linear_pipeline.reduce_cost,
        "all_reduce": linear_pipeline.cost,
    }

    def seconds(nbytes: float) -> float:
        line: LinearCost = functions[operation](NETWORK, RANKS, block_nbytes=min(BLOCK, nbytes))
        return line.seconds(nbytes)

    return seconds


def _measured() -> Iterator[Claim]:
    """Table 1 with alpha, beta and gamma of emulated hosts, beside collectives measured on them (as Fig. 3 does)."""
    for record, row in measured_rows("collectives"):
        operation, strategy, engine, hosts = (row[name] for name in ("operation", "strategy", "engine", "hosts"))
        if strategy != "ring":
            nbytes = row["nbytes"]
            what = f"Table 1, {operation} by {strategy}, {engine}, {hosts} hosts at 1 Gb/s, {nbytes / 1e6:.2g} MB (s)"
            key = f"measured/{operation}/{strategy}/{engine}/{hosts}/{nbytes}"
            yield compare_measured(key, what, _on_our_hosts(row), row["seconds"], record)


def _on_our_hosts(row: Mapping[str, Any]) -> float:
    network = Network(
        row["hosts"], row["alpha_seconds"], row["beta_seconds_per_byte"], row["gamma_seconds_per_byte"]
    )  # fmt: skip
    block = 4 * Options().pipe_block(row["nbytes"] // 4)
    return printed_seconds(row["operation"], row["strategy"], network, row["hosts"], row["nbytes"], block)


@dataclass(frozen=True, slots=True)
class Costs:
    """What the collectives cost."""

    reduce: Cost
    broadcast: Cost
    all_reduce: Cost


def reduce_broadcast_seconds(trace: Trace, costs: Costs) -> float:
    """Return the iteration of Algorithm 2: compute, reduce to the root, broadcast the weights."""
    nbytes = sum(trace.nbytes)
    return trace.compute_seconds + costs.reduce(nbytes) + costs.broadcast(nbytes)


def all_reduce_seconds(trace: Trace, costs: Costs, resync_every: int | None = RESYNC_EVERY) -> float:
    """Return the mean iteration of Algorithm 3: compute, all-reduce, and now and then a broadcast of the weights."""
    nbytes = sum(trace.nbytes)
    resync = costs.broadcast(nbytes) / resync_every if resync_every else 0.0
    return trace.compute_seconds + costs.all_reduce(nbytes) + resync


def layers_seconds(trace: Trace, costs: Costs) -> float:
    """Return the steady iteration of Algorithm 1: reduce during backward, broadcast during the next forward pass."""
    tasks: list[Task] = []
    updates: list[int] = []  # of each iteration, the task after which the root has updated all weights
    for _ in range(_ITERATIONS):
        last = _forward(tasks, trace, costs, updates[-1] if updates else None)
        updates.append(_backward(tasks, trace, costs, last))
    ran = run_tasks(tasks)
    return ran[updates[-1]].end_seconds - ran[updates[-2]].end_seconds


def _forward(tasks: list[Task], trace: Trace, costs: Costs, update: int | None) -> int:
    """Add a forward pass, layer by layer, each after its weights; return its last task."""
    share = trace.forward_seconds / trace.backward_seconds if trace.backward_seconds else 0.0
    before = update
    for tensor, nbytes in reversed(list(zip(trace.tensors, trace.nbytes, strict=True))):
        after = [] if before is None else [before]
        if update is not None:
            tasks.append(Task(costs.broadcast(nbytes), (_NETWORK,), (update,)))
            after.append(len(tasks) - 1)
        tasks.append(Task(share * tensor.backward_seconds, (_COMPUTE,), tuple(after)))
        before = len(tasks) - 1
    assert before is not None  # a trace has at least one tensor
    return before


def _backward(tasks: list[Task], trace: Trace, costs: Costs, before: int) -> int:
    """Add a backward pass, each layer reduced once it is computed; return the update that ends the iteration."""
    reduced = []
    for tensor, nbytes in zip(trace.tensors, trace.nbytes, strict=True):
        tasks.append(Task(tensor.backward_seconds, (_COMPUTE,), (before,)))
        before = len(tasks) - 1
        tasks.append(Task(costs.reduce(nbytes), (_NETWORK,), (before,)))
        reduced.append(len(tasks) - 1)
    tasks.append(Task(0.0, (), tuple(reduced)))
    return len(tasks) - 1
