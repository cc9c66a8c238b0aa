from hypothesis import given
from hypothesis import strategies as st

from penstock.curves import CodecCurves, Curve
from penstock.network import Network
from penstock.plan import Route
from penstock.planners.selective import partitions_to_measure
from planners.instances import make_trace

curves = st.builds(Curve, *(st.integers(0, 20).map(float) for _ in range(3)))
codecs = st.builds(CodecCurves, st.sampled_from([0.0, 0.03125, 0.25]), curves, curves)


def eq_2(strategy, workers, k, nbytes, alpha, beta, codec):
    """HiPress Eq. 2 with Table 3's counts for co-located aggregators (erratum 7), and Eq. 1 where there is no codec."""
    part, sends = nbytes / k, 2 * (workers - 1)
    if codec is None:
        return sends * (alpha + beta * part)
    encodes = workers if strategy == "ring" else k
    sent = alpha + beta * (codec.ratio * part + codec.fixed_nbytes)
    return sends * sent + encodes * codec.encode.seconds(part) + workers * codec.decode.seconds(part)


@given(
    st.sampled_from(["ring", "parameter_server"]),
    st.integers(2, 9),
    st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    st.integers(0, 50),
    st.integers(0, 9),
    codecs,
)
def test_what_is_measured_holds_the_best_of_every_k_of_every_gradient(strategy, workers, sizes, alpha, beta, codec):
    network = Network(workers, float(alpha), float(beta), 0.0, codecs={"onebit": codec})
    trace = make_trace([1] * len(sizes), sizes)
    found = {1, workers, *partitions_to_measure(trace, network, Route(strategy, "onebit"))}
    for nbytes in trace.nbytes:
        costs = {k: eq_2(strategy, workers, k, nbytes, alpha, beta, codec) for k in range(1, workers + 1)}
        dense = min(eq_2(strategy, workers, k, nbytes, alpha, beta, None) for k in range(1, workers + 1))
        best = min(costs.values())
        tolerance = 1e-9 * (1 + best)
        assert best >= dense - tolerance or min(costs[k] for k in found if k in costs) <= best + tolerance


def test_one_k_on_either_side_of_the_strategys_own_is_measured_whatever_the_curves():
    trace, network = make_trace([1], [1000]), Network(8, 1e-3, 1e-9, 1e-10)
    assert partitions_to_measure(trace, network, Route("ring", "onebit")) == (4, 32)
    assert partitions_to_measure(trace, Network(2, 1e-3, 1e-9, 1e-10), Route("ring", "onebit")) == (8,)
    assert partitions_to_measure(trace, Network(1, 0.0, 0.0, 1e-10), Route("ring", "onebit")) == ()
