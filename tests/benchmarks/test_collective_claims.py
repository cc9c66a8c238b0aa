"""Claims are computed from rows: each a ratio beside what it should be."""

from collective_claims import claims
from study import Claim


def row(hosts, engine, operation, strategy, seconds, rate="1gbit", nbytes=16_000_000, predicted=None):
    return {
        "hosts": hosts, "rate": rate, "engine": engine, "operation": operation, "strategy": strategy,
        "nbytes": nbytes, "seconds": seconds, "floor_seconds": 0.128, "predicted_seconds": predicted,
    }  # fmt: skip


def test_a_ring_slower_than_gloos_by_four_percent_misses_its_claim():
    rows = [row(4, "gloo", "all_reduce", "native", 0.192), row(4, "gloo", "all_reduce", "ring", 0.200)]
    (claim,) = claims(rows)
    assert claim == Claim("4 hosts: ring of 16 MB, speed over gloo's own", 0.96, 0.97)
    assert not claim.holds


def test_a_pipeline_is_compared_with_its_bound_the_tree_and_itself_on_two_hosts():
    rows = [
        row(2, "gloo", "broadcast", "linear_pipeline", 0.130),
        row(4, "gloo", "broadcast", "linear_pipeline", 0.140),
        row(4, "gloo", "broadcast", "spanning_tree", 0.280),
        row(8, "gloo", "broadcast", "linear_pipeline", 0.169),
    ]
    found = {claim.text: (round(claim.value, 3), claim.holds) for claim in claims(rows)}
    assert found == {
        "4 hosts, gloo: pipelined broadcast of 16 MB over bytes / rate": (1.094, True),
        "4 hosts, gloo: pipelined broadcast, speed over the spanning tree": (2.0, True),
        "gloo: pipelined broadcast, time on 8 hosts over 2": (1.3, False),
    }


def test_a_prediction_may_be_off_by_a_tenth_either_way_above_a_megabyte():
    rows = [
        row(4, "mpi", "all_reduce", "ring", 0.2, predicted=0.221),
        row(4, "mpi", "reduce", "linear_pipeline", 0.2, predicted=0.181),
        row(4, "mpi", "broadcast", "linear_pipeline", 0.2, predicted=0.4, nbytes=1_000_000),
    ]
    assert [claim.holds for claim in claims(rows)] == [False, True]


def test_loopback_asks_to_be_as_fast_as_gloo():
    rows = [
        row(4, "gloo", "all_reduce", "native", 0.05, "loopback"),
        row(4, "gloo", "all_reduce", "ring", 0.04, "loopback"),
    ]
    assert [(claim.text, claim.holds) for claim in claims(rows)] == [
        ("loopback, 4 ranks: ring all_reduce of 16 MB, speed over gloo's", True)
    ]
