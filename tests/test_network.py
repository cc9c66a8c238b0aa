import json

import pytest

from penstock.curves import CodecCurves, Curve
from penstock.errors import FormatError, NetworkError
from penstock.network import LinearCost, Network, load_network, save_network

CODECS = {
    "onebit": CodecCurves(1 / 32, Curve(1e-10, 2e-6, 3e-6), Curve(5e-11, 1e-6), Curve(7e-11, 1e-6), fixed_nbytes=44),
    "fp16": CodecCurves(0.5, Curve(1e-10, 2e-6), Curve(5e-11, 1e-6)),
}
LINES = {
    "ring": LinearCost(6e-4, 1.6e-9),
    "ring+onebit": LinearCost(
        1e-3, 1e-10, 2e-5, least_seconds=4e-4, least_core_seconds=1e-4, core_seconds_per_byte=1e-11
    ),
}
NETWORK = Network(4, 1e-4, 1e-9, 1e-10, LINES, CODECS, name="lab", source="by hand", cores=2, ranks_per_machine=4)


def test_a_network_survives_the_round_trip(tmp_path):
    save_network(NETWORK, tmp_path / "n.json")
    assert load_network(tmp_path / "n.json") == NETWORK


def test_costs_are_lines_and_add_up():
    assert LinearCost(1.0, 0.5).seconds(4) == 3.0
    assert LinearCost(1.0, 0.5) + LinearCost(2.0, 0.25, 3.0) == LinearCost(3.0, 0.75, 3.0)
    assert NETWORK.link.seconds(1000) == pytest.approx(1e-4 + 1e-6)


def test_what_is_not_measured_may_be_left_out(tmp_path):
    document = {
        "format": "penstock-network/1",
        "workers": 2,
        "alpha_seconds": 0,
        "beta_seconds_per_byte": 0,
        "gamma_seconds_per_byte": 0,
    }
    (tmp_path / "n.json").write_text(json.dumps(document))
    assert load_network(tmp_path / "n.json").all_reduce == {}
    assert load_network(tmp_path / "n.json").codecs == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "workers: found 0; wanted a whole number >= 1"),
        ({"alpha_seconds": -1}, "alpha_seconds: found -1; wanted a finite number >= 0"),
        ({"beta_seconds_per_byte": None}, "beta_seconds_per_byte: found None"),
        ({"all_reduce": {"ring": {"a_seconds": 1}}}, "all_reduce.ring.b_seconds_per_byte: found nothing"),
        ({"all_reduce": []}, "all_reduce: found []; wanted an object"),
        ({"codecs": {"onebit": {"ratio": 1}}}, "codecs.onebit.encode: found nothing; wanted a JSON object"),
        (
            {"codecs": {"x": {"ratio": 1, "encode": {"startup_seconds": -1, "seconds_per_byte": 0}, "decode": {}}}},
            "codecs.x.encode.startup_seconds: found -1; wanted a finite number >= 0",
        ),
        ({"codecs": {"onebit": {"speed": 1}}}, "codecs.onebit.speed: found 1; wanted no such field"),
        ({"latency": 1}, "latency: found 1; wanted no such field"),
    ],
)
def test_a_broken_file_names_its_field(tmp_path, change, message):
    save_network(NETWORK, tmp_path / "n.json")
    document = json.loads((tmp_path / "n.json").read_text()) | change
    (tmp_path / "n.json").write_text(json.dumps(document))
    with pytest.raises(FormatError, match=r"n\.json: ") as caught:
        load_network(tmp_path / "n.json")
    assert message in str(caught.value)


def test_networks_built_in_python_are_checked_too():
    with pytest.raises(NetworkError, match="workers is 0; wanted >= 1"):
        Network(0, 0, 0, 0)
    with pytest.raises(NetworkError, match="alpha_seconds is nan"):
        Network(1, float("nan"), 0, 0)
    with pytest.raises(NetworkError, match="a_seconds is -1"):
        LinearCost(-1, 0)


def test_ranks_wait_for_cores_only_where_there_are_fewer_of_them():
    assert NETWORK.ranks_per_core == 2.0
    assert Network(4, 0, 0, 0, cores=8, ranks_per_machine=4).ranks_per_core == 1.0
    assert Network(4, 0, 0, 0).ranks_per_core == 1.0  # not known
    with pytest.raises(NetworkError, match="-1 cores for 1 ranks of a machine; wanted >= 0 and >= 1"):
        Network(1, 0, 0, 0, cores=-1)


def test_curves_built_in_python_are_checked_too():
    with pytest.raises(NetworkError, match="curve: startup_seconds is -1; wanted a finite number >= 0"):
        Curve(0, -1)
    with pytest.raises(NetworkError, match="codec curves: ratio is inf"):
        CodecCurves(float("inf"), Curve(0, 0), Curve(0, 0))
