from time import sleep

import numpy as np
import pytest

from penstock.program import Collective
from penstock.runtime.measure import measure_network
from runtime.threads import run_ranks


class Paced:
    """A transport of one rank of a made-up network: messages and all-reduces take as long as a line says."""

    rank, world_size = 0, 4

    def __init__(self, link, native):
        self.link, self.native_line = link, native

    def isend(self, view, peer, tag):
        return Sleep(0.0)

    def irecv(self, view, peer, tag):
        return Sleep(self.link[0] + self.link[1] * view.nbytes)

    def native(self, collective, values, dtype, root, seconds):
        assert collective is Collective.ALL_REDUCE
        if values.dtype == np.float32:  # agreeing on times is free, so that only what is measured takes time
            sleep(self.native_line[0] + self.native_line[1] * values.nbytes)


class Sleep:
    def __init__(self, seconds):
        self.seconds = seconds

    def wait(self, seconds):
        sleep(self.seconds)


def test_a_network_of_known_lines_is_measured_within_a_few_percent():
    measured = measure_network(Paced(link=(10e-3, 8e-9), native=(15e-3, 12e-9)), seconds=3.0)
    network = measured.network
    assert network.workers == 4
    assert network.alpha_seconds == pytest.approx(10e-3, rel=0.2)
    assert network.beta_seconds_per_byte == pytest.approx(8e-9, rel=0.1)
    assert network.all_reduce["native"].a_seconds == pytest.approx(15e-3, rel=0.2)
    assert network.all_reduce["native"].b_seconds_per_byte == pytest.approx(12e-9, rel=0.1)
    assert 0 < network.gamma_seconds_per_byte < 1e-8
    assert measured.fits["link"].median_error < 0.1


class Hiding(Paced):
    """An engine whose all-reduce hides its startup behind its own transfer, as gloo's does."""

    def native(self, collective, values, dtype, root, seconds):
        if values.dtype == np.float32:
            sleep(max(self.native_line[0], self.native_line[1] * values.nbytes))


def test_large_messages_are_foreseen_where_a_startup_hides_behind_its_transfer():
    line = measure_network(Hiding(link=(1e-4, 1e-9), native=(6e-3, 6e-9)), seconds=4.0).network.all_reduce["native"]
    assert line.b_seconds_per_byte == pytest.approx(6e-9, rel=0.03)  # up to 16 MiB alone: 8% too flat


def test_on_a_slow_network_the_largest_size_is_left_out():
    fits = measure_network(Paced(link=(1e-4, 1e-9), native=(1e-3, 15e-9)), seconds=0.5).fits
    assert fits["native"].points < 9


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_return_the_same_network(world_size):
    found = run_ranks(world_size, lambda transport: measure_network(transport, seconds=1.0).network)
    assert found[0].workers == world_size
    assert all(network == found[0] for network in found)
