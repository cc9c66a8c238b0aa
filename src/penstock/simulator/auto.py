"""Whether compression pays: predicted before anything is enabled, and said in a sentence.

Compression loses a little of every gradient for a while, and costs processor time that the model leaves out, so it has
to promise more than a tie: less than `LEAST_GAIN` and it is left off.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cost.ways import Way, comparable, compressed_ways, way_for
from penstock.network import Network
from penstock.plan import Plan
from penstock.planners import PLANNERS
from penstock.simulator.iteration import predict
from penstock.trace import Trace

LEAST_GAIN = 0.05  # of the dense iteration
COMPRESSED_STRATEGIES = ("ring", "parameter_server", "all_gather", "gtopk", "gtopk_doubling")


@dataclass(frozen=True, slots=True)
class CodecDecision:
    """What to run, what it was compared with, and why."""

    plan: Plan
    dense: Plan  # the best plan without a codec
    ways: tuple[Way, ...]  # all that were considered
    reason: str  # one sentence for a person

    @property
    def compresses(self) -> bool:
        """Whether any bucket goes through a codec."""
        return any(bucket.codec is not None for bucket in self.plan.buckets)


def decide_codec(
    trace: Trace,
    network: Network,
    codecs: Sequence[str] | None = None,
    strategies: Sequence[str] = ("ring",),
    compressed_strategies: Sequence[str] = COMPRESSED_STRATEGIES,
    partitions: Sequence[int] = (1,),
    workers: int | None = None,
    least_gain: float = LEAST_GAIN,
    slowdown: float = 1.0,
) -> CodecDecision:
    """Plan `trace` with and without codecs and return the plan to run.

    `codecs` are those to choose from (default: all whose curves the network has), `strategies` carry dense buckets and
    `compressed_strategies` the others. A codec without curves is not considered; the reason says so.
    While gradients are computed, messages take `slowdown` times as long.
    """
    wanted = list(network.codecs) if codecs is None else list(codecs)
    known = [codec for codec in wanted if codec in network.codecs]
    packed = compressed_ways(network, compressed_strategies, known, partitions, workers)
    every = comparable([*(way_for(network, strategy, workers) for strategy in strategies), *packed])
    dense_ways = [way for way in every if way.codec is None]
    p = network.workers if workers is None else workers
    dense = predict(trace, PLANNERS["joint"], dense_ways, p, slowdown)
    best = predict(trace, PLANNERS["joint"], every, p, slowdown)
    gain = 1 - best.iteration_seconds / dense.iteration_seconds if dense.iteration_seconds else 0.0
    pays = gain >= least_gain and any(bucket.codec for bucket in best.buckets)
    reason = _why_on(best, dense) if pays else _why_off(best, dense, wanted, known, p, least_gain)
    return CodecDecision(best if pays else dense, dense, tuple(every), reason)


def _why_on(best: Plan, dense: Plan) -> str:
    packed = [bucket for bucket in best.buckets if bucket.codec is not None]
    codecs = ", ".join(dict.fromkeys(str(bucket.codec) for bucket in packed))
    speed = dense.iteration_seconds / best.iteration_seconds
    return (
        f"compression is on: {codecs} for {len(packed)} of {len(best.buckets)} messages; predicted iteration "
        f"{_ms(best.iteration_seconds)}, without compression {_ms(dense.iteration_seconds)}: {speed:.2f} times as fast"
    )


def _why_off(best: Plan, dense: Plan, wanted: list[str], known: list[str], workers: int, least_gain: float) -> str:
    off = "compression is left off: "
    if workers == 1:
        return off + "one worker sends nothing"
    if not known:
        which = ", ".join(wanted) or "any codec"
        return off + f"what {which} would cost was not measured; measure it with `penstock measure --codecs`"
    if not any(bucket.codec for bucket in best.buckets):
        return off + (
            f"with {', '.join(known)} no message would be faster; predicted iteration "
            f"{_ms(dense.iteration_seconds)}, of which {_ms(dense.non_overlapped_seconds)} is communication not hidden"
        )
    return off + (
        f"the iteration would take {_ms(best.iteration_seconds)} with {', '.join(known)} and "
        f"{_ms(dense.iteration_seconds)} without; it must save at least {100 * least_gain:.0f}%"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"
