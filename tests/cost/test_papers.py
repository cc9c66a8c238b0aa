"""HiPress Eq. 1-2 and Table 3, written out by hand."""

import pytest

from penstock.cost.papers import CASYNC, SyncCounts, casync_ps_counts, sync_seconds
from penstock.curves import CodecCurves, Curve
from penstock.errors import NetworkError
from penstock.strategies import parameter_server, ring

SEND, ENCODE, DECODE = Curve(2.0, 3.0), Curve(5.0, 7.0), Curve(11.0 / 4, 13.0)  # a quarter of 11 per payload byte
CODEC = CodecCurves(0.25, ENCODE, DECODE)


def test_table_3():
    assert ring.counts(8, 4) == SyncCounts(14, 8, 8)
    assert casync_ps_counts(8, 4) == SyncCounts(16, 5, 9)
    assert parameter_server.counts(8, 4) == SyncCounts(14, 4, 8)


@pytest.mark.parametrize(("k", "part"), [(1, 64.0), (4, 16.0)])
def test_equations_1_and_2(k, part):
    plain = 14 * (3 + 2 * part)
    assert sync_seconds(ring.counts, 8, k, 64, SEND) == pytest.approx(plain)
    packed = 14 * (3 + 2 * part / 4) + 8 * (7 + 5 * part) + 8 * (13 + 11 * part / 4)
    assert sync_seconds(ring.counts, 8, k, 64, SEND, CODEC) == pytest.approx(packed)


def test_more_partitions_than_workers_go_in_batches():
    part = 64 / 10
    one_batch = 2 * 3 * (3 + 2 * part / 4) + 4 * (7 + 5 * part) + 4 * (13 + 11 * part / 4)
    assert sync_seconds(parameter_server.counts, 4, 10, 64, SEND, CODEC) == pytest.approx(3 * one_batch)


def test_a_curve_never_falls_below_its_floor():
    assert Curve(1.0, 0.0, floor_seconds=5.0).seconds(3) == 5.0
    assert Curve(1.0, 0.0, floor_seconds=5.0).seconds(8) == 8.0


@pytest.mark.parametrize("name", CASYNC)
def test_one_worker_needs_no_synchronisation(name):
    assert sync_seconds(CASYNC[name], 1, 1, 64, SEND, CODEC) == 0.0


def test_no_partitions_are_refused():
    with pytest.raises(NetworkError, match="0 partitions among 4 workers; wanted at least 1 of each"):
        sync_seconds(ring.counts, 4, 0, 64, SEND)
