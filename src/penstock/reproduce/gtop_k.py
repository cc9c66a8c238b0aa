"""gTop-k S-SGD (Shi et al.): Table I, Fig. 9 and the ratios of Table VII."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.cost.clusters import CLUSTERS
from penstock.cost.papers import dense, gtop_k, top_k
from penstock.reproduce.claim import Claim, compare_exactly, compare_numbers

NETWORK = CLUSTERS["gtop-k-1gbe"]
WORKERS = 32
DENSITY = 0.001
_ALPHA_MS, _BETA_MS_PER_BYTE = 0.436, 9e-6  # section IV-C, in the paper's units


@dataclass(frozen=True, slots=True)
class Model:
    """A row of Tables V to VII."""

    name: str
    parameters: int  # of the architecture; the paper gives none
    batch: int
    compute_seconds: float  # Table VI
    compress_seconds: float  # Fig. 11, as typed into the authors' plot script
    dense_images_per_second: float  # Table VII, all workers together
    over_dense: float  # Table VII, g/d
    over_top_k: float  # Table VII, g/t


MODELS = (
    Model("VGG-16", 14_728_266, 128, 0.097, 0.091353, 403, 7.5, 1.5),
    Model("ResNet-20", 269_722, 128, 0.146, 0.001618, 9212, 2.7, 1.1),
    Model("AlexNet", 61_100_840, 64, 0.369, 0.383776, 39, 12.8, 1.7),
    Model("ResNet-50", 25_557_032, 256, 4.842, 0.15405, 343, 3.65, 1.3),
)


def claims(record: Mapping[str, Any] | None = None) -> list[Claim]:
    """Return every claim that formulas can settle, and those that a record of `benchmarks/gtop_k.py` can."""
    simulated = [claim for model in MODELS for claim in _table_7(model)]
    replayed = [claim for model in MODELS for claim in _replayed(model, record)] if record else []
    return [*_table_1(), *_figure_9(), *simulated, *replayed]


def _table_1() -> list[Claim]:
    """Write the three formulas out in the paper's units, for 100 MB and 32 workers, and compare."""
    nbytes, log = 100e6, 5
    elements = DENSITY * nbytes / 4
    formulas = {
        "DenseAllReduce": (2 * 31 * _ALPHA_MS + 2 * 31 / 32 * nbytes * _BETA_MS_PER_BYTE, dense(NETWORK, WORKERS)),
        "TopKAllReduce": (
            log * _ALPHA_MS + 2 * 31 * elements * 4 * _BETA_MS_PER_BYTE,
            top_k(NETWORK, WORKERS, DENSITY),
        ),
        "gTopKAllReduce": (
            2 * log * _ALPHA_MS + 4 * elements * log * 4 * _BETA_MS_PER_BYTE,
            gtop_k(NETWORK, WORKERS, DENSITY),
        ),
    }
    return [
        compare_numbers(f"Table I, {name}, 100 MB, 32 workers (ms)", ms, 1e3 * cost.seconds(nbytes), "computed", 1e-9)
        for name, (ms, cost) in formulas.items()
    ]


def _figure_9() -> list[Claim]:
    """TopKAllReduce is faster on few workers, gTopKAllReduce from 32 on at the latest (100 MB, density 0.001)."""
    faster = [p for p in (4, 8, 16, 32, 64, 128) if _global(p) < _local(p)]
    return [
        compare_exactly("Fig. 9 left: top-k faster on 4 workers", "yes", "no" if 4 in faster else "yes", "computed"),
        compare_exactly("Fig. 9 left: gTop-k faster on 32", "yes", "yes" if 32 in faster else "no", "computed"),
        Claim("Fig. 9 left: crossing point (workers)", "not given", str(faster[0]), "computed", "ours only"),
    ]


def _local(p: int) -> float:
    return top_k(NETWORK, p, DENSITY).seconds(100e6)


def _global(p: int) -> float:
    return gtop_k(NETWORK, p, DENSITY).seconds(100e6)


def _table_7(model: Model) -> list[Claim]:
    """Iteration = computation + compression + communication, nothing overlapped, as the paper runs it."""
    nbytes = 4 * model.parameters
    plain = model.compute_seconds + dense(NETWORK, WORKERS).seconds(nbytes)
    work = model.compute_seconds + model.compress_seconds
    local = work + top_k(NETWORK, WORKERS, DENSITY).seconds(nbytes)
    merged = work + gtop_k(NETWORK, WORKERS, DENSITY).seconds(nbytes)
    real = WORKERS * model.batch / model.dense_images_per_second
    why = f"Table VII's dense iteration is {real:.2f} s, Eq. 5's {plain:.2f} s: that cluster was slower than its model"
    return [
        compare_numbers(f"Table VII, {model.name}: g/d", model.over_dense, plain / merged, "simulated", 0.2, why),
        compare_numbers(f"Table VII, {model.name}: g/t", model.over_top_k, local / merged, "simulated", 0.2, why),
    ]


def _replayed(model: Model, record: Mapping[str, Any]) -> Iterator[Claim]:
    """Compare Table VII with iterations replayed on emulated hosts: fewer of them, on one machine's processor."""
    rows = [row for row in record["rows"] if row["model"] == model.name]
    seconds = {row["method"]: row["seconds"] for row in rows}
    if not {"ring", "topk_allgather", "gtopk"} <= seconds.keys():
        return
    hosts, nbytes = rows[0]["hosts"], 4 * model.parameters
    formula = model.compute_seconds + dense(NETWORK, hosts).seconds(nbytes)
    why = (
        f"the table is of 32 GPUs; here {hosts} hosts share one machine, whose dense iteration took "
        f"{seconds['ring']:.2f} s and should take {formula:.2f} s by Eq. 5"
    )
    for text, published, method in (("g/d", model.over_dense, "ring"), ("g/t", model.over_top_k, "topk_allgather")):
        what = f"Table VII, {model.name}: {text}, replayed on {hosts} emulated hosts"
        yield compare_numbers(what, published, seconds[method] / seconds["gtopk"], "replayed", 0.2, why)
