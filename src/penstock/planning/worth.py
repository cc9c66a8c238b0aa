"""Will it pay? What merging and each safe codec would make of a training step, before anything is changed.

The comparison is with stock DDP: its buckets of 25 MB, summed by the engine's own all-reduce. What saves less than
`LEAST_GAIN` is advised against, and so is what a measurement does not show clearly.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.cost.ways import way_for
from penstock.curves import CodecCurves, Curve
from penstock.errors import PlanError, did_you_mean
from penstock.exchange.compression import ANY, ANY_ON_DEVICE, AUTO_CODECS, NATIVE
from penstock.network import LinearCost, Network
from penstock.plan import Plan, Route
from penstock.planning.candidates import codecs_of
from penstock.planning.decide import best_plan
from penstock.planning.explain import text_picture
from penstock.simulator.auto import LEAST_GAIN
from penstock.simulator.fitted import fitted_cost
from penstock.timeline import COMPUTE, Span, Timeline
from penstock.trace import Trace

OPTIMIZERS = {  # the codecs that are offered for each, the safest first: docs/choosing-a-codec.md has the runs
    "adamw": AUTO_CODECS,
    "adam": AUTO_CODECS,
    "sgd": AUTO_CODECS,
    "other": ("bf16",),  # nothing was trained with it: rounding only
}
DOUBTFUL = 0.13  # of an iteration: by so much were predictions of coded ones on GPUs too low (docs/training.md)
NOISY = 0.25  # of an iteration: where measured ones differ by more, even a no is unsure
PASS_SECONDS_PER_BYTE = 1e-12  # one pass over a GPU's memory at 1 TB/s, where no GPU is here to measure
ASSUMED_GPU_CURVES = {  # passes over memory and some launches
    codec: CodecCurves(
        ratio,
        encode=Curve(4 * PASS_SECONDS_PER_BYTE, 60e-6),
        decode=Curve(2 * PASS_SECONDS_PER_BYTE, 30e-6),
        decode_add=Curve(3 * PASS_SECONDS_PER_BYTE, 30e-6),
    )
    for codec, ratio in zip(AUTO_CODECS, (0.5, 0.254, 0.129), strict=True)
}
GPU_SUM_SECONDS_PER_BYTE = 3 * PASS_SECONDS_PER_BYTE  # a received gradient into a local one: two reads and a write
Verdict = Literal["yes", "no", "unsure"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured iterations of one kind."""

    seconds: float  # their median
    spread: float  # how far the medians of rounds are apart, as a part of it


@dataclass(frozen=True, slots=True)
class Worth:
    """What stock DDP takes, what would take less, and what to write; seconds of one iteration."""

    trace: Trace
    network: Network
    stock: Plan  # as stock DDP sends
    merged: Plan  # dense, in the best messages
    coded: dict[str, Plan]  # by codec, the safest first; all messages encoded, in the best ones
    advised: Plan  # `stock` itself where nothing is predicted to save enough
    optimizer: str  # a key of OPTIMIZERS
    bounds: Mapping[str, float] = field(default_factory=dict)  # of codecs not measured: an iteration takes this or more
    step_seconds: float | None = None  # of the optimizer; None: not known, and not counted
    stock_sample: Sample | None = None  # real iterations of stock DDP
    advised_sample: Sample | None = None  # real iterations as advised
    engine: str | None = None  # that the wrapper must be told: mpi

    @property
    def codec(self) -> str | None:
        """The codec that is advised."""
        return next((bucket.codec for bucket in self.advised.buckets if bucket.codec is not None), None)

    @property
    def stock_seconds(self) -> float:
        """What an iteration takes with stock DDP: measured where it was, predicted otherwise."""
        return self.seconds_of(self.stock)

    @property
    def advised_seconds(self) -> float:
        """What an iteration takes as advised: measured where it was, predicted otherwise."""
        return self.seconds_of(self.advised) if self.advised_sample is None else self.advised_sample.seconds

    def seconds_of(self, plan: Plan) -> float:
        """Return what an iteration takes with a plan, beside a measured iteration of stock DDP."""
        return self._beside_stock(plan.iteration_seconds)

    def _beside_stock(self, predicted_seconds: float) -> float:
        """Return a prediction with the optimizer's step, related to a measured iteration of stock DDP.

        What that took longer than predicted is in every iteration: no plan saves it. Where it took less, the
        predictions are too long, and all are scaled.
        """
        step = self.step_seconds or 0.0
        if self.stock_sample is None:
            return predicted_seconds + step
        longer = self.stock_sample.seconds - self.stock.iteration_seconds - step
        return (predicted_seconds + step) * self._scale + max(0.0, longer)

    @property
    def _scale(self) -> float:
        """By what predictions are multiplied: less than 1 where stock DDP took less than predicted."""
        if self.stock_sample is None:
            return 1.0
        return min(1.0, self.stock_sample.seconds / (self.stock.iteration_seconds + (self.step_seconds or 0.0)))

    @property
    def waiting_seconds(self) -> float:
        """How much of stock DDP's iteration nothing is computed in."""
        computed = self.trace.compute_seconds + (self.step_seconds or 0.0)
        return max(0.0, self.stock_seconds - computed * self._scale)

    @property
    def saved(self) -> float:
        """The part of stock DDP's iteration that the advised settings save."""
        return 1 - self.advised_seconds / self.stock_seconds

    @property
    def spread(self) -> float:
        """How far measured iterations of one kind are apart; 0 where none was measured."""
        return max((each.spread for each in (self.stock_sample, self.advised_sample) if each is not None), default=0.0)

    @property
    def verdict(self) -> Verdict:
        """Whether to change anything; unsure where prediction or measurement do not show it."""
        if self.advised is self.stock:
            return "unsure" if self.spread > NOISY else "no"
        doubt = DOUBTFUL if self.stock_sample is None else self.spread
        if abs(self.saved) <= doubt and doubt >= LEAST_GAIN:
            return "unsure"
        return "yes" if self.saved >= LEAST_GAIN else "no"

    @property
    def code(self) -> str:
        """What to write; "" where stock DDP is as good."""
        if self.verdict == "no" or self.advised is self.stock:
            return ""
        options = [f'codec="{self.codec}"'] if self.codec else []
        options += [f'engine="{self.engine}"'] if self.engine else []
        return f"DDP({', '.join(['model', *options])})"

    def lines(self) -> Iterator[str]:
        """Say it in five lines."""
        share = self.waiting_seconds / self.stock_seconds
        yield (
            f"your iteration   {_ms(self.stock_seconds)} with {self._stock_name} on {self.network.workers} workers "
            f"({self._kind}); {_ms(self.waiting_seconds)} of it, {share:.0%}, waits for the network"
        )
        yield f"merging          {self._against(self.merged)} in {_count(len(self.merged.messages))}, gradients dense"
        yield f"codecs           {'; '.join(filter(None, (self._codecs(), self._unmeasured())))}"
        yield f"answer           {self._answer()}"
        yield f"write            {self._write()}"

    @property
    def _stock_name(self) -> str:
        return "stock DDP" if self.engine is None else f"stock DDP's messages over {self.engine.upper()}"

    @property
    def _kind(self) -> str:
        if self.stock_sample is not None:
            return f"measured, spread {self.stock_sample.spread:.0%}"
        return "predicted" if self.step_seconds is not None else "predicted, without the optimizer's step"

    def _against(self, plan: Plan) -> str:
        seconds = self.seconds_of(plan)
        return f"{_ms(seconds)} ({self.stock_seconds / seconds:.2f}x)"

    def _codecs(self) -> str:
        return ", ".join(f"{name} {self._against(plan)}" for name, plan in self.coded.items())

    def _unmeasured(self) -> str:
        least = {name: self._beside_stock(seconds) for name, seconds in self.bounds.items()}
        found = ", ".join(f"{name} at least {_ms(seconds)}" for name, seconds in least.items())
        return f"not measured: {found}" if found else ""

    def _answer(self) -> str:
        times = f"{self.stock_seconds / self.advised_seconds:.2f} times as fast as {self._stock_name}"
        if self.verdict == "unsure":
            return f"unsure: {self._doubt}, and {self._claim}"
        if self.verdict == "yes":
            measured = f"measured, spread {self.spread:.0%}"
            return f"yes: {times}, {'by prediction' if self.advised_sample is None else measured}"
        if self.advised is not self.stock:
            took = f"{_ms(self.advised_seconds)} measured where {_ms(self.seconds_of(self.advised))} was predicted"
            return f"no: {took}; keep stock DDP"
        if self.waiting_seconds < LEAST_GAIN * self.stock_seconds:
            return "no: computation hides the network already; keep stock DDP"
        return f"no: nothing here saves {LEAST_GAIN:.0%} of an iteration; keep stock DDP"

    @property
    def _doubt(self) -> str:
        if self.stock_sample is None:
            return f"predictions have been up to {DOUBTFUL:.0%} too low"
        return f"spread {self.spread:.0%} between measured iterations"

    @property
    def _claim(self) -> str:
        if self.advised is self.stock:
            return f"nothing is predicted to save {LEAST_GAIN:.0%}"
        how = "predicted" if self.advised_sample is None else "measured"
        return f"{self.saved:.0%} {how} to be saved"

    def _write(self) -> str:
        if self.verdict == "unsure":
            tried = f", or try {self.code}" if self.code else ""
            longer = "measure for longer (--seconds 50) or with less beside it"
            return f"nothing yet: {'measure it' if self.stock_sample is None else longer}{tried}"
        return f"model = {self.code}, with DDP from penstock.torch" if self.code else "nothing"

    def picture(self) -> list[str]:
        """Draw an iteration of stock DDP above one with the advised settings, each as long as `lines` say."""
        drawn = {"stock": (self.stock, self.stock_seconds)}
        drawn |= {} if self.advised is self.stock else {"advised": (self.advised, self.advised_seconds)}
        return text_picture(
            {
                name: _ending(plan.timeline, self.step_seconds or 0.0, end)
                for name, (plan, end) in drawn.items()
                if plan.timeline is not None
            }
        )


def worth(
    trace: Trace,
    network: Network,
    routes: Sequence[Route],
    optimizer: str,
    bounds: Mapping[str, float] | None = None,
    step_seconds: float | None = None,
    engine: str | None = None,
) -> Worth:
    """Return what `routes` would make of a training step on a network; `routes` need one that is dense.

    Codecs that are not safe for the optimizer are left out.
    """
    check_optimizer(optimizer)
    safe = OPTIMIZERS[optimizer]
    dense = [route for route in routes if route.codec is None]
    stock = best_plan(trace, network, "threshold", [Route(NATIVE)] if Route(NATIVE) in dense else dense[:1])
    merged = best_plan(trace, network, "exact", dense)
    coded = {
        codec: best_plan(trace, network, "exact", [each for each in routes if each.codec == codec])
        for codec in codecs_of(routes)
        if codec in safe
    }
    advised = stock
    for plan in (merged, *coded.values()):  # each must save more than what came before it
        if plan.iteration_seconds <= (1 - LEAST_GAIN) * advised.iteration_seconds:
            advised = plan
    left = {name: seconds for name, seconds in (bounds or {}).items() if name in safe}
    return Worth(trace, network, stock, merged, coded, advised, optimizer, left, step_seconds, engine=engine)


def check_optimizer(optimizer: str) -> None:
    """Refuse an unknown optimizer before anything is measured."""
    if optimizer not in OPTIMIZERS:
        near = did_you_mean(optimizer, OPTIMIZERS)
        raise PlanError(f"--optimizer: found {optimizer!r}; wanted one of {', '.join(OPTIMIZERS)}{near}")


def described_network(workers: int, bits_per_second: float | None, alpha_seconds: float) -> Network:
    """Return a network of processors that is known by its rate alone; None: without a limit. Sums run at 10 GB/s."""
    rate = "no limit" if bits_per_second is None else f"{bits_per_second / 1e9:g} Gb/s"
    beta = 0.0 if bits_per_second is None else 8 / bits_per_second
    name = f"{workers} workers, {rate}, {1e6 * alpha_seconds:g} us a message"
    return Network(workers, alpha_seconds, beta, 1e-10, name=name, source="described, not measured")


def with_gpus(network: Network) -> Network:
    """Return a network whose workers have GPUs: sums and codecs at the speed of their memory, as assumed here.

    A bucket's kernels are launched as one CUDA graph, so that a bucket of many tensors takes what one tensor takes.
    """
    found = replace(network, gamma_seconds_per_byte=GPU_SUM_SECONDS_PER_BYTE, codecs=dict(ASSUMED_GPU_CURVES))
    ways = [way_for(found, route, estimate=fitted_cost) for route in described_routes(on_gpu=True) if route.codec]
    lines = {
        str(way.route): LinearCost(way.whole.a_seconds + way.seconds_per_tensor, way.whole.b_seconds_per_byte, 0.0)
        for way in ways
    }
    return replace(found, all_reduce=lines)


def described_routes(on_gpu: bool = False) -> tuple[Route, ...]:
    """Return the routes that are compared where nothing was measured: our ring dense, and each safe codec."""
    strategies = ANY_ON_DEVICE if on_gpu else ANY
    return (Route("ring"), *(Route(strategy, codec) for codec in AUTO_CODECS for strategy in strategies))


def _ending(timeline: Timeline, step_seconds: float, end_seconds: float) -> Timeline:
    """Return a timeline with the optimizer's step at its end, scaled where it would end later than it should."""
    scale = min(1.0, end_seconds / (timeline.iteration_seconds + step_seconds))
    scaled = [
        replace(each, start_seconds=each.start_seconds * scale, end_seconds=each.end_seconds * scale)
        for each in timeline.spans
    ]
    step = [Span("optimizer", COMPUTE, end_seconds - step_seconds * scale, end_seconds)] if step_seconds else []
    return Timeline((*scaled, *step))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _count(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages} messages"
