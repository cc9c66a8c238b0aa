"""Measured networks are kept per cluster and found again."""

from dataclasses import replace

import torch_measuring as training
from penstock.torch.measure import Cluster, measurement_path
from spawn import spawn

HERE = Cluster(("a", "b"), "gloo", "cpu", 2)


def test_other_hosts_engines_devices_and_numbers_have_other_files(tmp_path):
    clusters = [
        HERE,
        replace(HERE, hosts=("a", "c")),
        replace(HERE, engine="nccl"),
        replace(HERE, device="cuda"),
        replace(HERE, hosts=("a", "b", "b"), workers=3),
        replace(HERE, nodes=((0, 1),)),
    ]
    assert len({measurement_path(tmp_path, cluster) for cluster in clusters}) == len(clusters)


def test_a_measurement_is_taken_from_its_file_unless_it_lacks_a_line(tmp_path):
    for first, again, another, files in spawn(2, training.measure_twice, str(tmp_path)):
        assert first == again
        assert set(first.all_reduce) == {"native"}
        assert set(another.all_reduce) == {"native", "ring"}
        assert (first.alpha_seconds, another.alpha_seconds) == (1, 2)
        assert files == 1


def test_an_engine_that_moves_device_memory_is_measured_there():
    networks = spawn(2, training.measure_on_device)
    assert networks[0] == networks[1]
    assert networks[0].workers == 2
    assert networks[0].all_reduce["native"].b_seconds_per_byte > 0
    assert networks[0].beta_seconds_per_byte > 0
