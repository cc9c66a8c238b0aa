import pytest

from penstock.cost.clusters import CLUSTERS, find_network
from penstock.errors import FormatError, NetworkError
from penstock.network import save_network
from penstock.strategies import ring


def test_the_six_published_clusters_and_the_simulations_constants_are_there():
    assert list(CLUSTERS) == [
        "mg-wfbp-k80-10gbe", "mg-wfbp-v100-10gbe", "mg-wfbp-v100-56gbib", "mg-wfbp-simulation", "gtop-k-1gbe",
        "hipress-100gbps", "hipress-56gbps",
    ]  # fmt: skip
    assert all(network.source for network in CLUSTERS.values())


@pytest.mark.parametrize("name", ["mg-wfbp-k80-10gbe", "mg-wfbp-v100-10gbe", "mg-wfbp-v100-56gbib"])
def test_inverting_the_ring_gives_back_the_published_line(name):
    network = CLUSTERS[name]
    line = ring.cost(network, 16)
    assert line.a_seconds == pytest.approx(network.all_reduce["ring"].a_seconds)
    assert line.b_seconds_per_byte == pytest.approx(network.all_reduce["ring"].b_seconds_per_byte)


def test_a_network_is_found_by_name_or_by_file(tmp_path):
    save_network(CLUSTERS["gtop-k-1gbe"], tmp_path / "n.json")
    assert find_network(str(tmp_path / "n.json")) == find_network("gtop-k-1gbe")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        NetworkError, match=r"no network called 'lan'; wanted a \.json file or one of mg-wfbp-k80-10gbe, "
    ):
        find_network("lan")
    with pytest.raises(FormatError, match="No such file"):
        find_network("nowhere.json")


def test_selecting_in_gtop_ks_curve_is_within_four_per_cent_of_its_figure_11():
    encode = CLUSTERS["gtop-k-1gbe"].codecs["sparse"].encode
    for parameters, seconds in (
        (14_728_266, 0.091353),
        (269_722, 0.001618),
        (61_100_840, 0.383776),
        (25_557_032, 0.15405),
    ):
        assert encode.seconds(4 * parameters) == pytest.approx(seconds, rel=0.04)
