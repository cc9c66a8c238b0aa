"""The methods that are compared, and how each turns workers' gradients into one update."""

from dataclasses import dataclass
from functools import partial

import torch

from penstock.bench.convergence import quantised, sparse
from penstock.bench.convergence.quantised import Parts, Quantise
from penstock.bench.convergence.sparse import Exchanged
from penstock.errors import PenstockError

WARMUP = (0.25, 0.0725, 0.015, 0.004)  # density in the first epochs (gTop-k, section IV)
SPARSE = {"topk": sparse.topk, "gtopk": sparse.gtopk, "gtopk-published": sparse.gtopk_published}
QUANTISED = ("onebit", "terngrad")


@dataclass(frozen=True, slots=True)
class Method:
    """What is exchanged, and what happens to the rest."""

    kind: str  # dense, topk, gtopk, gtopk-published, onebit, terngrad or dgc
    density: float = 0.0  # of what is sent; quantising methods send every element and have none
    feedback: bool = True  # False: what is not sent is lost (TernGrad's rounding is right on average)

    @property
    def name(self) -> str:
        """A short name for tables and pictures."""
        density = f" {self.density:g}" if self.density else ""
        return f"{self.kind}{density}{'' if self.feedback else ', no feedback'}"

    def densities(self, epochs: int) -> list[float]:
        """Return the density of every epoch; 1 is dense.

        Sparse methods begin with the paper's warm-up, quantising ones dense for as long (Seide et al. begin so too).
        """
        if self.kind == "dense":
            return [1.0] * epochs
        first = [1.0] * len(WARMUP) if self.kind in QUANTISED else [max(self.density, step) for step in WARMUP]
        return first[:epochs] + [self.density] * (epochs - len(WARMUP))


def parse_method(text: str) -> Method:
    """Return the method written as KIND, KIND:DENSITY or KIND:nofeedback."""
    kind, _, rest = text.partition(":")
    if kind not in ("dense", "dgc", *SPARSE, *QUANTISED):
        raise PenstockError(f"no method {kind!r}; wanted dense, dgc, {', '.join((*SPARSE, *QUANTISED))}")
    if rest == "nofeedback":
        return Method(kind, feedback=False)
    return Method(kind, float(rest or 0))


def exchange(
    method: Method,
    wanted: torch.Tensor,
    density: float,
    parts: Parts,
    generator: torch.Generator | None = None,
) -> Exchanged:
    """Return the sum all workers apply and what each keeps; `wanted` has a row per worker."""
    if density >= 1:
        return wanted.sum(0), torch.zeros_like(wanted)
    if method.kind in SPARSE:
        return SPARSE[method.kind](wanted, max(1, round(density * wanted.shape[1])))
    applied, residuals = quantised.exchange(wanted, _quantise(method, density, generator), parts)
    return applied, residuals if method.feedback else torch.zeros_like(residuals)


def _quantise(method: Method, density: float, generator: torch.Generator | None) -> Quantise:
    if method.kind == "onebit":
        return quantised.onebit
    if method.kind == "terngrad":
        return partial(quantised.terngrad, generator=generator)
    return partial(quantised.largest, density=density)
