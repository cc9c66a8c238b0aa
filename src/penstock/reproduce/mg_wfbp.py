"""MG-WFBP (Shi, Chu, Li): Fig. 10 and 11, Table 4, and the merging example of the introduction."""

from penstock.cost.clusters import CLUSTERS
from penstock.errors import TraceError
from penstock.planners import PLANNERS
from penstock.reproduce.claim import Claim, compare_exactly, compare_numbers
from penstock.simulator.scaling import ScalingRow, scaling_study
from penstock.trace import Trace
from penstock.traces import load_shipped

WORKERS = [2**exponent for exponent in range(2, 12)]
FIG_10_MESSAGES = [10, 6, 6, 5, 3, 2, 1, 1, 1, 1]
TABLE_4 = {"googlenet": (59, 13e6), "resnet50": (161, 25.5e6), "resnet152": (467, 60.1e6), "densenet201": (604, 20e6)}
AUTHORS = (64, 13_379_136)  # layers with parameters, and elements, of the authors' GoogLeNet on a K80
_CAFFE = "the shipped GoogLeNet has weights and biases as tensors of their own, auxiliary classifiers included"


def claims(googlenet: Trace | None) -> list[Claim]:
    """Return every claim that can be checked; `googlenet` is the authors' K80 trace."""
    if googlenet is not None:
        _check_googlenet(googlenet)
    found = [*_table_4(), *_merging_example()]
    return [*_figure_10(googlenet), *_figure_11(googlenet), *found] if googlenet else found


def _check_googlenet(trace: Trace) -> None:
    """Refuse another model's trace, of which these claims say nothing."""
    found = len(trace.tensors), sum(tensor.numel for tensor in trace.tensors)
    if found != AUTHORS:
        words = "{} tensors, {} elements"
        raise TraceError(
            f"{trace.model}: found {words.format(*found)}; wanted {words.format(*AUTHORS)}: the authors' GoogLeNet"
        )


def _study(trace: Trace, workers: list[int], strategy: str) -> dict[tuple[int, str], ScalingRow]:
    planners = [PLANNERS[name] for name in ("wfbp", "single", "greedy", "exact")]
    rows = scaling_study(trace, CLUSTERS["mg-wfbp-simulation"], workers, planners, strategy)
    return {(row.workers, row.planner): row for row in rows}


def _figure_10(trace: Trace) -> list[Claim]:
    rows = _study(trace, WORKERS, "ring")
    messages = [rows[p, "greedy"].messages for p in WORKERS]
    found = [compare_exactly("Fig. 10, GoogLeNet: messages on 4..2048 workers", FIG_10_MESSAGES, messages, "simulated")]
    for planner, published in (("wfbp", 1.78), ("single", 1.35)):
        ratio = rows[64, planner].iteration_seconds / rows[64, "greedy"].iteration_seconds
        what = f"Fig. 10, GoogLeNet, 64 workers: speed over {planner}"
        found.append(compare_numbers(what, published, ratio, "simulated", 0.02, "the log the paper used is not known"))
    for p in (128, 256):
        ratio = rows[p, "greedy"].iteration_seconds / rows[p, "exact"].iteration_seconds
        what = f"Theorem 1, {p} workers: greedy over the optimum"
        found.append(compare_numbers(what, 1.0, ratio, "simulated", 1e-9, "Algorithm 1 is not optimal (erratum 1)"))
    return found


def _figure_11(trace: Trace) -> list[Claim]:
    workers = [p for p in WORKERS if p >= 128]
    rows = _study(trace, workers, "double_tree")
    beaten = all(
        rows[p, "greedy"].iteration_seconds <= rows[p, "wfbp"].iteration_seconds < rows[p, "single"].iteration_seconds
        for p in workers
    )
    what = "Fig. 11, double trees, 128..2048 workers: merged <= wfbp < single"
    return [compare_exactly(what, "yes", "yes" if beaten else "no", "simulated")]


def _table_4() -> list[Claim]:
    found = []
    for name, (tensors, parameters) in TABLE_4.items():
        trace = load_shipped(name)
        count = sum(tensor.numel for tensor in trace.tensors)
        why = _CAFFE if name == "googlenet" else "the architecture differs"
        found.append(compare_exactly(f"Table 4, {name}: tensors", tensors, len(trace.tensors), "computed", why))
        found.append(compare_numbers(f"Table 4, {name}: parameters", parameters, float(count), "computed", 0.03, why))
    return found


def _merging_example() -> list[Claim]:
    """200 KB twice against 400 KB once on 8 nodes: 3.0 ms against 1.8 ms."""
    line = CLUSTERS["mg-wfbp-k80-10gbe"].all_reduce["ring"]
    ratio = 2 * line.seconds(200e3) / line.seconds(400e3)
    why = "published for 8 nodes and MPI; computed with Fig. 4(a)'s line for 16 GPUs"
    return [compare_numbers("Introduction: 200 KB twice over 400 KB once", 3.0 / 1.8, ratio, "computed", 0.1, why)]
