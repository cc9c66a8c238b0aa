"""Which codec pays, if any: predicted before anything is enabled, and said in a sentence.

Compression loses a little of every gradient for a while, and costs processor time that the model leaves out, so it has
to promise more than a tie: less than `LEAST_GAIN` and it is left off. The same holds between codecs. They are given
in the order of what they risk, the safest first, and a bolder one must be predicted to save `LEAST_GAIN` more than what
was chosen among those before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.cost.ways import Way, comparable, compressed_ways, way_for
from penstock.network import Network
from penstock.plan import Plan
from penstock.planners import PLANNERS, Planner
from penstock.simulator.fitted import fitted_cost
from penstock.simulator.iteration import predict_robust
from penstock.trace import Trace

LEAST_GAIN = 0.05  # of the iteration that it is compared with
COMPRESSED_STRATEGIES = ("ring", "parameter_server", "all_gather", "gtopk", "gtopk_doubling")


@dataclass(frozen=True, slots=True)
class CodecDecision:
    """What to run, what it was compared with, and why."""

    plan: Plan
    dense: Plan  # the best plan without a codec
    candidates: dict[str, Plan]  # codec: the best plan that may use it, in the order given
    ways: tuple[Way, ...]  # all that were considered
    reason: str  # one line for a person

    @property
    def compresses(self) -> bool:
        """Whether any bucket goes through a codec."""
        return _compresses(self.plan)

    @property
    def plan_codec(self) -> str | None:
        """The codec of the plan."""
        return next((bucket.codec for bucket in self.plan.buckets if bucket.codec is not None), None)


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

    `codecs` are those to choose from, the safest first (default: all whose curves the network has), `strategies` carry
    dense buckets and `compressed_strategies` the others. A codec without curves is not considered; the reason says so.
    While gradients are computed, messages take `slowdown` times as long.
    """
    wanted = list(network.codecs) if codecs is None else list(codecs)
    dense = [way_for(network, strategy, workers, fitted_cost) for strategy in strategies]
    packed = {
        codec: compressed_ways(network, compressed_strategies, [codec], partitions, workers, fitted_cost)
        for codec in wanted
        if codec in network.codecs
    }
    p = network.workers if workers is None else workers
    return decide_among(trace, p, dense, packed, least_gain, slowdown, missing=[c for c in wanted if c not in packed])


def decide_among(
    trace: Trace,
    workers: int,
    dense: Sequence[Way],
    packed: Mapping[str, Sequence[Way]],
    least_gain: float = LEAST_GAIN,
    slowdown: float = 1.0,
    planner: Planner = PLANNERS["joint"],
    missing: Sequence[str] = (),
) -> CodecDecision:
    """Return the plan to run, of the best without a codec and the best with each, which may leave buckets dense.

    `packed` has the ways of each codec, the safest first; `missing` are codecs whose cost is not known.
    """
    every = comparable([*dense, *(way for ways in packed.values() for way in ways)])
    plain = [way for way in every if way.codec is None]
    without = predict_robust(trace, planner, plain, workers, slowdown)
    found = {
        codec: predict_robust(
            trace, planner, [*plain, *(way for way in every if way.codec == codec)], workers, slowdown
        )
        for codec in packed
    }
    chosen = without
    for plan in found.values():
        if _compresses(plan) and plan.iteration_seconds <= (1 - least_gain) * chosen.iteration_seconds:
            chosen = plan
    why = _why_on(chosen, without) if chosen is not without else _why_off(found, without, missing, workers, least_gain)
    return CodecDecision(chosen, without, found, tuple(every), f"{why}; {_times(without, found)}")


def _compresses(plan: Plan) -> bool:
    return any(bucket.codec is not None for bucket in plan.buckets)


def _why_on(chosen: Plan, dense: Plan) -> str:
    """Say which codecs are used, and what they gain. Not for how many messages: lanes and races may cut them anew."""
    packed = [bucket for bucket in chosen.buckets if bucket.codec is not None]
    speed = dense.iteration_seconds / chosen.iteration_seconds
    codecs = ", ".join(dict.fromkeys(str(bucket.codec) for bucket in packed))
    share = sum(bucket.nbytes for bucket in packed) / chosen.nbytes
    what = "all gradients" if len(packed) == len(chosen.buckets) else f"{100 * share:.3g}% of the gradients' bytes"
    return f"compression is on: {codecs} for {what}, {speed:.2f} times as fast as dense"


def _why_off(found: Mapping[str, Plan], dense: Plan, missing: Sequence[str], workers: int, least_gain: float) -> str:
    off = "compression is left off: "
    if workers == 1:
        return off + "one worker sends nothing"
    if not found:
        which = ", ".join(missing) or "any codec"
        return off + f"what {which} would cost was not measured; measure it with `penstock measure --codecs`"
    if not any(map(_compresses, found.values())):
        return off + (
            f"with {', '.join(found)} no message would be faster; {_ms(dense.non_overlapped_seconds)} of communication "
            "is not hidden"
        )
    return off + f"it must save at least {100 * least_gain:.0f}%"


def _times(dense: Plan, found: Mapping[str, Plan]) -> str:
    named = {"dense": dense} | dict(found)
    return "predicted iteration: " + ", ".join(f"{name} {_ms(plan.iteration_seconds)}" for name, plan in named.items())


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"
