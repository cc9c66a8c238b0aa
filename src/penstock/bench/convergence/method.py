"""The methods that are compared, and how each turns workers' gradients into one update."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from penstock.bench.convergence import quantised, sparse
from penstock.bench.convergence.sparse import Exchanged
from penstock.bench.convergence.triton_segments import Segments
from penstock.errors import PenstockError

WARMUP = (0.25, 0.0725, 0.015, 0.004)  # densities at the beginning (gTop-k, section IV)
SPARSE = {"topk": sparse.topk, "gtopk": sparse.gtopk, "gtopk-published": sparse.gtopk_published}
QUANTISED = {"onebit": quantised.onebit, "terngrad": quantised.terngrad}
Exchange = Callable[[torch.Tensor], Exchanged]  # of what every worker wants, [run, worker, element]


@dataclass(frozen=True, slots=True)
class Method:
    """What is exchanged, and what happens to the rest."""

    kind: str  # dense, topk, gtopk, gtopk-published, onebit, terngrad or dgc
    density: float = 0.0  # of what is sent; quantising methods send every element and have none
    feedback: bool = True  # False: what is not sent is lost (TernGrad's rounding is right on average)
    corrected: bool = False  # DGC's momentum correction and factor masking; plain: the optimizer has the momentum
    dense_below: int = 0  # tensors of fewer elements are sent dense
    rate: float = 1.0  # times the task's learning rate

    @property
    def name(self) -> str:
        """A short name for tables and pictures."""
        said = [f" {self.density:g}"] if self.density else []
        said += [", no feedback"] if not self.feedback else []
        said += [", corrected"] if self.corrected else []
        said += [f", dense below {self.dense_below}"] if self.dense_below else []
        said += [f", rate x {self.rate:g}"] if self.rate != 1 else []
        return self.kind + "".join(said)

    def density_at(self, stage: int) -> float:
        """Return the density of a stage of the warm-up, or after it; 1 is dense.

        Sparse methods begin with the paper's warm-up, quantising ones dense for as long (Seide et al. begin so too).
        """
        if self.kind == "dense":
            return 1.0
        if stage >= len(WARMUP):
            return self.density
        return 1.0 if self.kind in QUANTISED else max(self.density, WARMUP[stage])


def parse_method(text: str) -> Method:
    """Return the method written as KIND and then, each after a colon, a density or options.

    >>> parse_method("gtopk:0.001:corrected:dense_below=65").name
    'gtopk 0.001, corrected, dense below 65'
    """
    kind, *options = text.split(":")
    if kind not in ("dense", "dgc", *SPARSE, *QUANTISED):
        raise PenstockError(f"no method {kind!r}; wanted dense, dgc, {', '.join((*SPARSE, *QUANTISED))}")
    return Method(kind, **dict(_option(option) for option in options))


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if name in ("corrected", "nofeedback"):
        return ("corrected", True) if name == "corrected" else ("feedback", False)
    if name in ("dense_below", "rate"):
        return name, int(value) if name == "dense_below" else float(value)
    return "density", float(text)


def make_exchange(method: Method, density: float, tensors: Segments) -> Exchange:
    """Return how workers exchange at a density; the tensors it needs are made now, not in a graph."""
    if density >= 1:
        return lambda wanted: (wanted.sum(-2), wanted.zero_())
    compressed = large_elements(method, tensors)
    sparse_part = _all_alike(method, density, tensors, compressed)
    if compressed == sum(tensors.sizes):
        return sparse_part

    def both(wanted: torch.Tensor) -> Exchanged:
        small = wanted[..., compressed:].sum(-2)
        wanted[..., compressed:] = 0
        applied, residuals = sparse_part(wanted)
        applied[..., compressed:] = small
        return applied, residuals

    return both


def large_elements(method: Method, tensors: Segments) -> int:
    """Return how many elements are compressed; tensors that travel dense are behind them."""
    large = [size for size in tensors.sizes if size >= method.dense_below]
    assert tuple(large) == tensors.sizes[: len(large)], "a layout has its small tensors last"
    return sum(large)


def _all_alike(method: Method, density: float, tensors: Segments, counted: int) -> Exchange:
    if method.kind in SPARSE:
        whole = Segments.of([sum(tensors.sizes)], str(tensors.index.device))
        return partial(SPARSE[method.kind], take=whole.taker([max(1, round(density * counted))]))
    if method.kind == "dgc":
        return quantised.largest(tensors, density)
    return partial(_quantised, method=method, tensors=tensors)


def _quantised(wanted: torch.Tensor, method: Method, tensors: Segments) -> Exchanged:
    applied, residuals = QUANTISED[method.kind](wanted, tensors)
    return applied, residuals if method.feedback else residuals.zero_()
