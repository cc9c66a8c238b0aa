import pytest

from penstock.cost.clusters import CLUSTERS
from penstock.cost.sparse import dense, gtop_k, top_k

NETWORK = CLUSTERS["gtop-k-1gbe"]
ALPHA, BETA = 0.436e-3, 9e-9
M = 100e6  # bytes of the dense gradient
K = 0.001 * M / 4  # entries of 4-byte values and 4-byte indices


@pytest.mark.parametrize(("p", "log"), [(2, 1), (4, 2), (32, 5), (5, 3)])
def test_table_1_of_gtop_k(p, log):
    assert dense(NETWORK, p).seconds(M) == pytest.approx(2 * (p - 1) * ALPHA + 2 * (p - 1) / p * M * BETA)
    assert top_k(NETWORK, p, 0.001).seconds(M) == pytest.approx(log * ALPHA + 2 * (p - 1) * K * 4 * BETA)
    assert gtop_k(NETWORK, p, 0.001).seconds(M) == pytest.approx(2 * log * ALPHA + 4 * K * log * 4 * BETA)


def test_figure_9_crosses_between_8_and_32_workers():
    times = {p: (top_k(NETWORK, p, 0.001).seconds(M), gtop_k(NETWORK, p, 0.001).seconds(M)) for p in (4, 8, 16, 32)}
    assert times[4][0] < times[4][1]
    assert times[32][0] > 1.5 * times[32][1]
