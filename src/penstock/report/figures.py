"""MG-WFBP's Fig. 1, 2, 10 and 11, redrawn from our own simulations."""

from pathlib import Path

from penstock.cost.clusters import CLUSTERS
from penstock.cost.ways import Way
from penstock.network import LinearCost
from penstock.plan import Route, cut_into_buckets
from penstock.planners import PLANNERS
from penstock.report.pictures import draw_scaling, draw_timelines
from penstock.simulator.iteration import predict, simulate_iteration
from penstock.simulator.scaling import scaling_study
from penstock.timeline import Timeline
from penstock.trace import Tensor, Trace

WORKERS = [2**exponent for exponent in range(2, 12)]
_WAY = Way("ring", (LinearCost(1.0e-3, 1.0e-9),))  # one startup is 1 ms, a megabyte 1 ms more


def draw_figures(folder: Path, scaling_trace: Trace) -> list[Path]:
    """Draw the four figures into `folder`; 10 and 11 scale `scaling_trace`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"mg-wfbp-fig{number}.png" for number in (1, 2, 10, 11)]
    draw_timelines(_figure_1(), paths[0], "Fig. 1: naive S-SGD, WFBP and SyncEASGD on a model of four layers")
    draw_timelines(_figure_2(), paths[1], "Fig. 2: when does merging layer l into l-1 pay? (startup 1 ms)")
    network = CLUSTERS["mg-wfbp-simulation"]
    planners = [PLANNERS[name] for name in ("wfbp", "single", "greedy", "exact")]
    for path, number, strategy, workers in (
        (paths[2], 10, "ring", WORKERS),
        (paths[3], 11, "double_tree", [p for p in WORKERS if p >= 128]),
    ):
        rows = scaling_study(scaling_trace, network, workers, planners, strategy)
        draw_scaling(rows, path, f"Fig. {number}: {scaling_trace.label}, {strategy} all-reduce, simulated")
    return paths


def _layers(*layers: tuple[float, float]) -> Trace:
    """Return a trace from (backward ms, megabytes) of each layer in ready order."""
    tensors = (Tensor(f"layer {len(layers) - i}", round(mb * 1e6 / 4), ms * 1e-3) for i, (ms, mb) in enumerate(layers))
    return Trace("layers", "paper", 1, "float32", 2e-3, tuple(tensors))


def _figure_1() -> dict[str, Timeline]:
    trace = _layers((2, 2), (1, 0.5), (1, 0.5), (2, 1))
    names = {"naive": "(a) naive S-SGD", "wfbp": "(b) WFBP", "single": "(c) SyncEASGD", "exact": "(d) the optimum"}
    return {title: predict(trace, PLANNERS[name], [_WAY], 4).timeline for name, title in names.items()}


def _figure_2() -> dict[str, Timeline]:
    """Each case once as it is and once with the last two layers merged."""
    cases = {
        "case 1, hidden": _layers((1, 1), (4, 1)),
        "case 2, merging saves": _layers((1, 1), (0.5, 1)),
        "case 3, merging waits too long": _layers((1, 1), (1.7, 1)),
        "case 4, the link is busy anyway": _layers((0.5, 3), (0.5, 1), (0.5, 1)),
    }
    found = {}
    for title, trace in cases.items():
        count = len(trace.tensors)
        for how, ends in (("as it is", list(range(count))), ("merged", [*range(count - 2), count - 1])):
            buckets = cut_into_buckets(trace, ends, [Route("ring")] * len(ends))
            found[f"{title}, {how}"] = simulate_iteration(trace, buckets, [_WAY])
    return found
