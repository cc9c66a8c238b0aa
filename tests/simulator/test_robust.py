"""Of plans that are predicted to take about the same time, the one with the fewest messages runs."""

from penstock.cost.ways import way_for
from penstock.network import LinearCost, Network
from penstock.planners import PLANNERS
from penstock.simulator.iteration import TIE, predict, predict_robust
from penstock.trace import Tensor, Trace

TRACE = Trace("model", "cpu", 1, "float32", 0.0, tuple(Tensor(f"t{i}", 250_000, 1e-3) for i in range(4)))


def plans(startup_seconds: float):
    lines = {"ring": LinearCost(startup_seconds, 1e-8), "native": LinearCost(startup_seconds, 1.01e-8)}
    network = Network(4, 1e-5, 1e-9, 1e-10, all_reduce=lines)
    ways = [way_for(network, name) for name in lines]
    return predict(TRACE, PLANNERS["joint"], ways, 4), predict_robust(TRACE, PLANNERS["joint"], ways, 4)


def test_a_gain_below_the_tie_is_left_for_fewer_messages() -> None:
    best, chosen = plans(startup_seconds=2.9e-3)
    assert len(best.buckets) == 2
    assert len(chosen.buckets) == 1
    assert best.iteration_seconds < chosen.iteration_seconds <= best.iteration_seconds / (1 - TIE)


def test_a_clear_gain_is_taken() -> None:
    best, chosen = plans(startup_seconds=1e-5)
    assert len(best.buckets) > 1
    assert chosen == best
