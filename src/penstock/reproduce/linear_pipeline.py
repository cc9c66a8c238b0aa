"""Linear pipeline (Wang, Vuduc et al.): Table 1, Eq. 2-3, invariance in p, and the step counts of Fig. 2."""

from dataclasses import replace

from penstock.network import LinearCost, Network
from penstock.program import Collective
from penstock.reproduce.claim import Claim, compare_exactly, compare_numbers
from penstock.simulator.bulk_synchronous import (
    Cost,
    Costs,
    all_reduce_seconds,
    layers_seconds,
    reduce_broadcast_seconds,
)
from penstock.simulator.program import count_steps, simulate_program
from penstock.strategies import (
    STRATEGIES,
    Options,
    bidirectional_exchange,
    build,
    linear_pipeline,
    spanning_tree,
)
from penstock.trace import Trace
from penstock.traces import find_trace

# Section 3.2: latency 1e-7 s and 1e9 bytes/s, blocks of 64 KB; AlexNet's 256 MB. No gamma is given.
NETWORK = Network(workers=4, alpha_seconds=1e-7, beta_seconds_per_byte=1e-9, gamma_seconds_per_byte=0.0)
BLOCK = 64 * 1024
NBYTES = 256 * 2**20


def claims() -> list[Claim]:
    """Return every claim that programs and formulas can settle."""
    return [*_steps(), *_table_1(), *_limits(), *_invariance(), *_algorithms()]


def _steps() -> list[Claim]:
    """Fig. 2: four blocks on three GPUs."""
    blocks = Options(block_numel=100)
    all_reduce, reduce, broadcast = (
        count_steps(build(operation, "linear_pipeline", 3, 400, blocks))
        for operation in ("all_reduce", "reduce", "broadcast")
    )
    return [
        compare_exactly("Fig. 2c: steps of an all-reduce of 4 blocks on 3 GPUs", 9, all_reduce, "computed"),
        compare_exactly("section 3: reduce and then broadcast", 10, reduce + broadcast, "computed"),
    ]


def _table_1() -> list[Claim]:
    """Table 1's formulas against the programs themselves, on 4 ranks and 1 MB."""
    found = []
    numel, block = 262_144, 16_384
    for operation in ("broadcast", "reduce"):
        for name in ("spanning_tree", "linear_pipeline"):
            options = Options(block_numel=block)
            ours = simulate_program(build(operation, name, 4, numel, options), NETWORK).seconds
            published = STRATEGIES[name].costs[Collective(operation)](NETWORK, 4, options)
            cost = published if name != "linear_pipeline" else _pipeline(operation, 4 * block)
            assert cost is not None
            why = "the formula counts one block too many: p-1+n/b where Fig. 2 has p-2+n/b"
            what = f"Table 1, {operation} by {name}, 4 ranks, 1 MB (s)"
            found.append(compare_numbers(what, cost.seconds(4 * numel), ours, "simulated", 1e-6, why))
    return found


def _pipeline(operation: str, block_nbytes: float) -> LinearCost:
    functions = {
        "broadcast": linear_pipeline.broadcast_cost,
        "reduce": linear_pipeline.reduce_cost,
        "all_reduce": linear_pipeline.cost,
    }
    return functions[operation](NETWORK, 4, block_nbytes=block_nbytes)


def _limits() -> list[Claim]:
    """Eq. 2 and 3: a pipelined broadcast is up to 2 and up to log p times faster."""
    pipeline = linear_pipeline.broadcast_cost(NETWORK, 4, block_nbytes=BLOCK).seconds(NBYTES)
    exchange = bidirectional_exchange.broadcast_cost(NETWORK, 4).seconds(NBYTES)
    tree = spanning_tree.broadcast_cost(NETWORK, 4).seconds(NBYTES)
    bound = 2 * (1 - 1 / 4) / (1 + BLOCK / NBYTES * 3)
    return [
        compare_numbers("Eq. 2, 4 GPUs, 256 MB: BE over LP", bound, exchange / pipeline, "computed", 0.01),
        compare_numbers(
            "Eq. 3, 4 GPUs, 256 MB: MST over LP", 2 / (3 * BLOCK / NBYTES + 1), tree / pipeline, "computed", 0.01
        ),
    ]


def _invariance() -> list[Claim]:
    times = {p: linear_pipeline.broadcast_cost(NETWORK, p, block_nbytes=BLOCK).seconds(NBYTES) for p in (2, 8)}
    what = "section 3.2: broadcast on 8 GPUs over that on 2, 256 MB"
    return [compare_numbers(what, 1.0, times[8] / times[2], "computed", 0.01)]


def _algorithms() -> list[Claim]:
    """Section 4.2: overlapped before all-reduce before reduce and broadcast.

    Layers and their shares of the computation are our GoogLeNet trace's; together they take Table 2's 0.267 s.

    Its numbers differ from section 3.3's: "Alg. 3", of cost max(comm, compt), is the overlapped one printed as
    Algorithm 1, "Alg. 1" is reduce and broadcast, printed as Algorithm 2.
    """
    trace = _stretched(find_trace("googlenet"), 0.267)
    costs = Costs(*(_cost(operation) for operation in ("reduce", "broadcast", "all_reduce")))
    overlapped, split = layers_seconds(trace, costs), reduce_broadcast_seconds(trace, costs)
    joined = all_reduce_seconds(trace, costs)
    why = "both send every byte twice; weights again every 5th time cost more than filling the pipe once saves"
    first = overlapped < min(split, joined)
    return [
        compare_exactly("section 4.2: overlapping beats both others", True, first, "simulated"),
        compare_exactly("section 4.2: all-reduce beats reduce and broadcast", True, joined < split, "simulated", why),
    ]


def _cost(operation: str) -> Cost:
    """Return what a pipelined collective costs; a message shorter than a block is one block."""
    return lambda nbytes: _pipeline(operation, min(BLOCK, nbytes)).seconds(nbytes)


def _stretched(trace: Trace, compute_seconds: float) -> Trace:
    """Return the trace with all times in proportion, so that they add up to `compute_seconds`."""
    factor = compute_seconds / trace.compute_seconds
    tensors = tuple(replace(tensor, backward_seconds=factor * tensor.backward_seconds) for tensor in trace.tensors)
    return replace(trace, forward_seconds=factor * trace.forward_seconds, tensors=tensors)
