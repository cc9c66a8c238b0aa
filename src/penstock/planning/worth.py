"""Will it pay? What merging and each safe codec would make of a training step, before anything is changed.

The comparison is with stock DDP: its buckets of 25 MB, its dense all-reduce. Only codecs that every recorded optimizer
bore are considered (`AUTO_CODECS`), and what saves less than `LEAST_GAIN` is advised against.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.curves import CodecCurves, Curve
from penstock.errors import PlanError, did_you_mean
from penstock.exchange.compression import ANY, AUTO_CODECS
from penstock.network import Network
from penstock.plan import Plan, Route
from penstock.planning.decide import best_plan, compared
from penstock.planning.explain import text_picture
from penstock.simulator.auto import LEAST_GAIN
from penstock.trace import Trace

OPTIMIZERS = ("adamw", "adam", "sgd", "other")
MUCH = 0.25  # of the best iteration: waiting that is left, and that a compressed optimizer might save
ASSUMED_GPU_CURVES = {  # four passes over memory at 1 TB/s and some launches: where no GPU is here to measure
    codec: CodecCurves(ratio, Curve(4e-12, 60e-6), Curve(2e-12, 30e-6), Curve(3e-12, 30e-6))
    for codec, ratio in zip(AUTO_CODECS, (0.5, 0.254, 0.129), strict=True)
}


@dataclass(frozen=True, slots=True)
class Worth:
    """What stock DDP takes, what would take less, and what to write; seconds of one iteration."""

    trace: Trace
    network: Network
    stock: Plan  # as stock DDP sends
    merged: Plan  # dense, in the best messages
    coded: dict[str, Plan]  # by codec, the safest first; each may leave messages dense
    advised: Plan
    optimizer: str
    measured_seconds: float | None = None  # a real iteration of stock DDP, where there was one

    @property
    def codec(self) -> str | None:
        """The codec that is advised."""
        return next((bucket.codec for bucket in self.advised.buckets if bucket.codec is not None), None)

    @property
    def stock_seconds(self) -> float:
        """What an iteration takes with stock DDP: measured where it was, predicted otherwise."""
        return self.measured_seconds or self.stock.iteration_seconds

    @property
    def waiting_seconds(self) -> float:
        """How much of that nothing is computed in."""
        return max(0.0, self.stock_seconds - self.trace.compute_seconds)

    @property
    def code(self) -> str:
        """What to write; "" where stock DDP is as good."""
        if self.codec is not None:
            return f'DDP(model, codec="{self.codec}")'
        return "DDP(model)" if self.advised is self.merged else ""

    @property
    def gain(self) -> float:
        """How many times as fast the advised settings are predicted to be."""
        return self.stock.iteration_seconds / self.advised.iteration_seconds

    def lines(self) -> Iterator[str]:
        """Say it in five lines."""
        kind, share = ("measured" if self.measured_seconds else "predicted"), self.waiting_seconds / self.stock_seconds
        yield (
            f"your iteration   {_ms(self.stock_seconds)} with stock DDP on {self.network.workers} workers ({kind}); "
            f"{_ms(self.waiting_seconds)} of it, {share:.0%}, waits for the network"
        )
        yield f"merging          {self._against(self.merged)} in {_count(len(self.merged.buckets))}, gradients dense"
        coded = ", ".join(f"{name} {self._against(plan)}" for name, plan in self.coded.items())
        yield f"codecs           {coded or 'none was measured: none could be faster'}"
        yield f"answer           {self._answer()}"
        yield f"write            {self._write()}"

    def _against(self, plan: Plan) -> str:
        return f"{_ms(plan.iteration_seconds)} ({self.stock.iteration_seconds / plan.iteration_seconds:.2f}x)"

    def _answer(self) -> str:
        if self.code:
            return f"yes: {self.gain:.2f} times as fast as stock DDP, by prediction"
        if self.waiting_seconds < LEAST_GAIN * self.stock_seconds:
            return "no: computation hides the network already; keep stock DDP"
        return f"no: nothing here saves {LEAST_GAIN:.0%} of an iteration; keep stock DDP"

    def _write(self) -> str:
        if not self.code:
            return "nothing"
        left = self.advised.non_overlapped_seconds > MUCH * self.advised.iteration_seconds
        more = "; still waiting: see CompressedAdamW, which sends half of that"
        more = more if left and self.optimizer == "adamw" and self.codec else ""
        return f"model = {self.code}, with DDP from penstock.torch{more}"

    def picture(self) -> list[str]:
        """Draw an iteration of stock DDP above one with the advised settings, as predicted."""
        timelines = {"stock": self.stock.timeline, "advised": self.advised.timeline}
        return text_picture({name: each for name, each in timelines.items() if each is not None})


def worth(
    trace: Trace, network: Network, routes: Sequence[Route], optimizer: str, measured_seconds: float | None = None
) -> Worth:
    """Return what `routes` would make of a training step on a network; `routes` need one that is dense."""
    check_optimizer(optimizer)
    dense = [route for route in routes if route.codec is None]
    stock, merged = (best_plan(trace, network, planner, dense) for planner in ("threshold", "exact"))
    found = compared(trace, network, "joint", routes)
    best = found.plan if found.compresses else merged
    enough = best.iteration_seconds <= (1 - LEAST_GAIN) * stock.iteration_seconds
    advised = best if enough else stock
    return Worth(trace, network, stock, merged, found.candidates, advised, optimizer, measured_seconds)


def check_optimizer(optimizer: str) -> None:
    """Refuse an unknown optimizer before anything is measured."""
    if optimizer not in OPTIMIZERS:
        near = did_you_mean(optimizer, OPTIMIZERS)
        raise PlanError(f"--optimizer: found {optimizer!r}; wanted one of {', '.join(OPTIMIZERS)}{near}")


def described_network(workers: int, bits_per_second: float, alpha_seconds: float) -> Network:
    """Return a network that is known by its rate alone; sums run at 10 GB/s."""
    rate = f"{bits_per_second / 1e9:g} Gb/s, {1e6 * alpha_seconds:g} us a message"
    return Network(workers, alpha_seconds, 8 / bits_per_second, 1e-10, name=rate, source="described, not measured")


def described_routes() -> tuple[Route, ...]:
    """Return the routes that are compared where nothing was measured: our ring dense, and each safe codec."""
    return (Route("ring"), *(Route(strategy, codec) for codec in AUTO_CODECS for strategy in ANY))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _count(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages} messages"
