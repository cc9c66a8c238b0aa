"""What a plan is made from: which routes, and their costs with one worker, who sends nothing."""

import pytest

pytest.importorskip("torch")
from penstock.errors import PlanError
from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.torch.compression import make_compression
from penstock.torch.planning import candidates, decide
from penstock.trace import Tensor, Trace

TRACE = Trace("toy", "a GPU", 1, "float32", 1e-3, tuple(Tensor(name, 1 << 20, 1e-3) for name in "dcba"))
ONEBIT = Route("ring", "onebit")
DENSE = ("native", "ring", "recursive_doubling")
PACKED = ("ring", "parameter_server", "all_gather")


def test_one_worker_needs_no_measured_line_of_the_engine():
    plan = decide(TRACE, Network(1, 0.0, 0.0, 1e-10), "exact", [Route("native")]).plan
    assert plan.iteration_seconds == pytest.approx(5e-3)
    with pytest.raises(PlanError, match="no measured line for 'native'"):
        decide(TRACE, Network(2, 1e-4, 1e-9, 1e-10), "exact", [Route("native")])


def test_the_measured_codec_of_one_worker_is_cut_into_buckets_that_hide_it():
    free = decide(TRACE, Network(1, 0.0, 0.0, 1e-10), "exact", [ONEBIT]).plan
    line = LinearCost(1e-5, 1e-10)  # 0.4 ms for each tensor, which takes 1 ms to compute
    measured = decide(TRACE, Network(1, 0.0, 0.0, 1e-10, {str(ONEBIT): line}), "exact", [ONEBIT]).plan
    assert free.iteration_seconds == pytest.approx(5e-3)
    assert len(measured.buckets) > len(free.buckets)
    assert measured.iteration_seconds == pytest.approx(5e-3 + 1e-5 + 4e-10 * (1 << 20), rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "codec", "wanted"),
    [
        ("auto", None, [*map(Route, DENSE)]),
        ("ring", None, [Route("ring")]),
        ("auto", "onebit", [Route(name, "onebit") for name in PACKED]),
        ("ring", "tbq", [Route("ring", "tbq")]),
        ("auto", "auto", [*map(Route, DENSE), *(Route(name, "onebit") for name in PACKED)]),
        ("ring", "auto", [Route("ring"), Route("ring", "onebit")]),
        ("all_gather", "auto", [*map(Route, DENSE), Route("all_gather", "onebit")]),  # which carries nothing dense
    ],
)
def test_candidates(strategy, codec, wanted):
    assert list(candidates(strategy, make_compression(codec))) == wanted


def test_dense_routes_beside_nccl_are_its_own():
    assert candidates("auto", make_compression(None), "nccl") == (Route("native"),)
