"""What a kept measurement holds for, and where it is kept."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
from penstock.codecs.registry import codec_digest
from penstock.errors import PlanError
from penstock.network import LinearCost, Network
from penstock.planning.measurement_cache import (
    Cluster,
    keep,
    load_kept,
    measurement_folder,
    measurement_path,
    read_links,
)

HERE = Cluster(("a", "b"), "gloo", "cpu", 2)


def test_whatever_a_measurement_depends_on_has_another_file(tmp_path):
    clusters = [
        HERE,
        replace(HERE, hosts=("a", "c")),
        replace(HERE, engine="nccl"),
        replace(HERE, device="cuda"),
        replace(HERE, hosts=("a", "b", "b"), workers=3),
        replace(HERE, nodes=((0, 1),)),
        replace(HERE, links=((("eth0", 1000),), ())),
        replace(HERE, links=((("eth0", 10000),), ())),
        replace(HERE, versions=(("torch", "2.13.0"),)),
        replace(HERE, codecs=("onebit",)),
    ]
    assert len({measurement_path(tmp_path, cluster) for cluster in clusters}) == len(clusters)


def test_a_codec_with_another_text_is_another_codec(tmp_path):
    from penstock.compll import algorithms

    shipped = (Path(algorithms.__path__[0]) / "onebit.cll").read_text()
    mine = tmp_path / "mine.cll"
    mine.write_text(shipped)
    before = codec_digest(str(mine))
    mine.write_text(shipped + "\n// changed\n")
    assert codec_digest(str(mine)) != before
    assert codec_digest("terngrad(bitwidth=2)") != codec_digest("terngrad(bitwidth=4)")


def test_measurements_are_in_the_cache_folder_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measurement_folder(None) == tmp_path / "penstock" / "measurements"
    assert measurement_folder(tmp_path / "mine") == measurement_folder(str(tmp_path / "mine")) == tmp_path / "mine"
    assert measurement_folder(False) is measurement_folder("off") is None
    with pytest.raises(PlanError, match="measurements is True; wanted a folder"):
        measurement_folder(True)
    with pytest.raises(PlanError, match="measurements is 3; wanted a folder"):
        measurement_folder(3)


def test_links_are_network_cards_that_are_up_and_say_their_speed(tmp_path):
    for name, card, state, speed in [
        ("eth0", True, "up", "25000"),
        ("eth1", True, "down", "1000"),
        ("eth2", True, "up", None),  # does not say
        ("veth0", False, "up", "10000"),  # virtual: what it says is not true
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
        if card:
            (tmp_path / name / "device").mkdir()
        if speed:
            (tmp_path / name / "speed").write_text(f"{speed}\n")
    assert read_links(tmp_path) == (("eth0", 25000),)
    assert read_links(tmp_path / "nowhere") == ()


def test_the_cache_folder_is_the_users_alone_and_one_that_others_may_write_is_not_read(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = measurement_path(measurement_folder(None), HERE)
    network = Network(2, 1e-4, 1e-9, 1e-10, {"ring": LinearCost(1e-4, 1e-9)})
    assert keep(network, path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert load_kept(path, 2) == network
    path.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="lets others write"):
        assert load_kept(path, 2) is None
    with pytest.warns(UserWarning, match="could not be kept"):
        assert not keep(network, path)
