import time
from pathlib import Path

import pytest

from penstock.cost.clusters import CLUSTERS
from penstock.errors import PlanError
from penstock.planners import PLANNERS
from penstock.simulator.scaling import Variation, scaling_study
from penstock.trace import Tensor, Trace, trace_from_csv

TRACE = Trace("toy", "paper", 1, "float32", 0.1, tuple(Tensor(f"t{i}", 10**6, 0.01) for i in range(20)))
ALL = list(PLANNERS.values())
WORKERS = [2**exponent for exponent in range(2, 12)]
GOOGLENET = Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "googlenet_k80_layers.csv"


@pytest.fixture(scope="module")
def googlenet():
    if not GOOGLENET.exists():
        pytest.skip("the authors' GoogLeNet/K80 trace is not beside this checkout (shared/data/traces)")
    trace = trace_from_csv(GOOGLENET, time_column="tmpcomm")
    planners = [PLANNERS[name] for name in ("wfbp", "single", "greedy", "exact")]
    rows = scaling_study(trace, CLUSTERS["mg-wfbp-simulation"], WORKERS, planners, "ring")
    return {(row.workers, row.planner): row for row in rows}


def test_figure_10s_messages_come_out(googlenet):
    assert [googlenet[p, "greedy"].messages for p in WORKERS] == [10, 6, 6, 5, 3, 2, 1, 1, 1, 1]


def test_figure_10s_speed_ups_come_out(googlenet):
    seconds = {name: googlenet[64, name].iteration_seconds for name in ("wfbp", "single", "greedy")}
    assert seconds["wfbp"] / seconds["greedy"] == pytest.approx(1.75, rel=0.02)
    assert seconds["single"] / seconds["greedy"] == pytest.approx(1.35, rel=0.02)


@pytest.mark.parametrize("p", [128, 256])
def test_the_optimum_is_a_third_faster_than_the_published_greedy(googlenet, p):
    assert googlenet[p, "greedy"].iteration_seconds >= 1.30 * googlenet[p, "exact"].iteration_seconds


def test_speed_up_and_efficiency_are_equations_4_and_5():
    for row in scaling_study(TRACE, CLUSTERS["gtop-k-1gbe"], [1, 3, 8], ALL, "ring"):
        assert row.speedup == pytest.approx(row.workers * 0.3 / row.iteration_seconds)
        assert row.efficiency == pytest.approx(row.speedup / row.workers)
        assert row.non_overlapped_seconds == pytest.approx(row.iteration_seconds - 0.3)


def test_one_worker_scales_perfectly():
    for row in scaling_study(TRACE, CLUSTERS["gtop-k-1gbe"], [1], ALL, "ring"):
        assert row.efficiency == pytest.approx(1.0)


def test_a_straggler_holds_everybody_up():
    even, uneven = (
        scaling_study(TRACE, CLUSTERS["gtop-k-1gbe"], [4], ALL, "ring", variation)
        for variation in (None, Variation(straggler=2.0, stragglers=1))
    )
    for fast, slow in zip(even, uneven, strict=True):
        assert slow.iteration_seconds > fast.iteration_seconds
    single = PLANNERS["single"]
    row = scaling_study(TRACE, CLUSTERS["gtop-k-1gbe"], [4], [single], "ring", Variation(straggler=2.0, stragglers=1))[
        0
    ]
    base = scaling_study(TRACE, CLUSTERS["gtop-k-1gbe"], [4], [single], "ring")[0]
    assert row.iteration_seconds - base.iteration_seconds == pytest.approx(0.3)  # twice the computation, same message


def test_jitter_is_repeatable_and_grows_with_the_world():
    jitter = Variation(jitter=0.2, iterations=200, seed=3)
    first, again = (scaling_study(TRACE, CLUSTERS["gtop-k-1gbe"], [4], ALL, "ring", jitter) for _ in range(2))
    assert first == again
    assert Variation(jitter=0.2, seed=4).slowest_factors(4) != Variation(jitter=0.2, seed=3).slowest_factors(4)
    assert sum(jitter.slowest_factors(256)) > sum(jitter.slowest_factors(4))
    mean = sum(Variation(jitter=0.2, iterations=20_000).slowest_factors(1)) / 20_000
    assert mean == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jitter": -1.0}, "jitter is -1.0"),
        ({"jitter": float("nan")}, "jitter is nan"),
        ({"straggler": 0.5}, "straggler is 0.5; wanted a factor >= 1"),
        ({"iterations": 0}, "0 iterations"),
    ],
)
def test_nonsense_variation_is_refused(options, message):
    with pytest.raises(PlanError, match=message):
        Variation(**options)


def test_2048_workers_and_600_tensors_are_studied_in_seconds():
    """A bound with room, so that a quadratic slip shows; benchmarks/planning_time.py has the figure."""
    trace = Trace("big", "paper", 1, "float32", 0.1, tuple(Tensor(f"t{i}", 10**5, 1e-4) for i in range(600)))
    start = time.perf_counter()
    rows = scaling_study(trace, CLUSTERS["mg-wfbp-simulation"], WORKERS, ALL[1:], "ring")
    assert len(rows) == 10 * 7
    assert time.perf_counter() - start < 20
