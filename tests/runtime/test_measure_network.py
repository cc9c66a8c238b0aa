import os
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.network import Network
from penstock.program import Collective
from penstock.runtime import measure_compressed
from penstock.runtime import measure_network as measuring
from penstock.runtime.communicator import Communicator
from penstock.runtime.hosts import group_by_host
from penstock.runtime.measure_network import link_holds, measure_line, measure_network, shared_cores
from penstock.runtime.timed import CoreClock
from penstock.strategies.linear_pipeline import DEFAULT_BLOCK_NBYTES, best_block_nbytes
from runtime.threads import run_ranks

GAMMA = 1e-10


class Waits:
    """Time that passes where somebody says so, and only there: exact whatever else the machine does."""

    def __init__(self):
        self.seconds = 0.0

    def sleep(self, seconds):
        self.seconds += seconds

    def now(self):
        return self.seconds


@pytest.fixture
def sleep(monkeypatch):
    waits = Waits()
    monkeypatch.setattr("penstock.runtime.timed.perf_counter", waits.now)
    merge = lambda left, _right: waits.sleep(GAMMA * left.nbytes)  # noqa: E731
    monkeypatch.setattr("penstock.runtime.measure_network.merge_kernel", lambda _dtype: merge)
    return waits.sleep


class Paced:
    """A transport of one rank of a made-up network: messages and all-reduces take as long as a line says."""

    rank, world_size = 0, 4

    def __init__(self, sleep, link, native):
        self.sleep, self.link, self.native_line = sleep, link, native

    def isend(self, view, peer, tag):
        return Waiting(self.sleep, 0.0)

    def irecv(self, view, peer, tag):
        return Waiting(self.sleep, self.link[0] + self.link[1] * view.nbytes)

    def native(self, collective, values, dtype, root, seconds):
        assert collective is Collective.ALL_REDUCE
        if values.dtype == np.float32:  # agreeing on times is free, so that only what is measured takes time
            self.sleep(self.native_line[0] + self.native_line[1] * values.nbytes)


class Waiting:
    def __init__(self, sleep, seconds):
        self.sleep, self.seconds = sleep, seconds

    def wait(self, seconds):
        self.sleep(self.seconds)


def test_a_network_of_known_lines_is_measured_within_a_few_percent(sleep):
    measured = measure_network(Paced(sleep, link=(2e-3, 8e-9), native=(6e-3, 12e-9)), seconds=3.0)
    network = measured.network
    assert network.workers == 4
    assert network.alpha_seconds == pytest.approx(2e-3, rel=0.2)
    assert network.beta_seconds_per_byte == pytest.approx(8e-9, rel=0.1)
    assert network.all_reduce["native"].a_seconds == pytest.approx(6e-3, rel=0.2)
    assert network.all_reduce["native"].b_seconds_per_byte == pytest.approx(12e-9, rel=0.1)
    assert network.gamma_seconds_per_byte == pytest.approx(GAMMA, rel=0.01)
    assert measured.fits["link"].median_error < 0.1


class Hiding(Paced):
    """An engine whose all-reduce hides its startup behind its own transfer, as gloo's does."""

    def native(self, collective, values, dtype, root, seconds):
        if values.dtype == np.float32:
            self.sleep(max(self.native_line[0], self.native_line[1] * values.nbytes))


def test_large_messages_are_foreseen_where_a_startup_hides_behind_its_transfer(sleep):
    line = measure_network(Hiding(sleep, link=(1e-4, 1e-9), native=(6e-3, 6e-9)), seconds=4.0).network.all_reduce[
        "native"
    ]
    assert line.b_seconds_per_byte == pytest.approx(6e-9, rel=0.05)  # up to 16 MiB alone: 10% too flat


def test_a_size_that_the_budget_allows_two_rounds_of_is_measured_too(sleep):
    slow = Hiding(sleep, link=(1e-4, 1e-9), native=(7e-3, 12e-9))  # gloo at 1 Gb/s; three routes share two seconds
    fit = measure_network(slow, seconds=1.34, most_nbytes=20_000_000).fits["native"]
    assert fit.points == 8  # 1 KiB to 4 MiB, and 16 MiB
    assert fit.line.seconds(30_000_000) == pytest.approx(0.36, rel=0.06)  # up to 4 MiB alone: 15% too little


def test_on_a_slow_network_the_largest_size_is_left_out(sleep):
    fits = measure_network(Paced(sleep, link=(1e-4, 1e-9), native=(1e-3, 15e-9)), seconds=0.5).fits
    assert fits["native"].points < 9


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_return_the_same_network(world_size):
    found = run_ranks(world_size, lambda transport: measure_network(transport, seconds=1.0).network)
    assert found[0].workers == world_size
    assert all(network == found[0] for network in found)


@pytest.mark.parametrize(("times", "holds"), [(1.0, True), (1.2, True), (0.8, True), (1.6, False), (0.6, False)])
def test_a_kept_link_holds_where_messages_take_about_what_they_took(sleep, times, holds):
    network = Network(4, 2e-3, 8e-9, 1e-10)
    now = Paced(sleep, link=(times * 2e-3, times * 8e-9), native=(0.0, 0.0))
    assert link_holds(now, network) == holds


def test_a_slow_link_is_checked_with_a_small_message_and_hiccups_do_not_count(sleep):
    class Hiccups(Paced):
        sizes, turns = set(), count()

        def irecv(self, view, peer, tag):
            self.sizes.add(view.nbytes)
            extra = 0.5 if next(self.turns) % 2 == 0 else 0.0
            return Waiting(self.sleep, extra + self.link[0] + self.link[1] * view.nbytes)

    slow = Hiccups(sleep, link=(2e-3, 8e-8), native=(0.0, 0.0))  # 100 Mb/s
    assert link_holds(slow, Network(4, 2e-3, 8e-8, 1e-10))
    assert slow.sizes == {1 << 18}


class Compressed:
    """Rounds of a compressed all-reduce on a clock of their own: 5 ms, 1 ns per byte and 0.1 ms per tensor."""

    def __init__(self, sleep):
        self.sleep, self.sizes = sleep, []

    def __call__(self, _communicator, _text, parts=None):
        tensors = 1 if parts is None else len(parts) - 1

        def one_round(_transport, values, _residual):
            self.sizes.append(values.size)
            self.sleep(5e-3 + 1e-9 * values.size + 1e-4 * (tensors - 1))

        return one_round


@pytest.mark.parametrize(
    ("seconds", "largest", "most"), [(0.3, 1 << 23, 0.6), (0.7, 1 << 25, 1.0), (1.2, 1 << 26, 1.5), (9.0, 1 << 26, 6.0)]
)
def test_a_compressed_line_takes_about_the_time_it_is_given(sleep, monkeypatch, seconds, largest, most):
    rounds, passed = Compressed(sleep), []
    monkeypatch.setattr(measure_compressed, "compressed_round", rounds)
    monkeypatch.setattr(measure_compressed, "Communicator", lambda transport, **_: SimpleNamespace(transport=transport))
    paced = Paced(lambda taken: (sleep(taken), passed.append(taken)), link=(0.0, 0.0), native=(0.0, 0.0))
    rounds.sleep = paced.sleep
    line = measure_compressed.compressed_line(paced, "ring+onebit", seconds, 0).line
    assert line.b_seconds_per_byte == pytest.approx(1e-9, rel=1e-3)
    assert line.a_seconds == pytest.approx(5e-3, rel=1e-3)
    assert line.c_seconds_per_tensor == pytest.approx(1e-4, rel=1e-3)
    assert max({*rounds.sizes} & {*measure_compressed.SIZES}) == largest
    assert sum(passed) < most


def test_ranks_of_one_machine_share_its_cores_whatever_their_networks(monkeypatch):
    """Emulated hosts are one machine; where ranks are dealt out to two in turn, nothing is said of cores."""
    monkeypatch.setattr("penstock.runtime.measure_network.processors", lambda: 2)
    assert run_ranks(4, shared_cores) == [(2, 4)] * 4

    def of_two_machines(transport, machine):
        monkeypatch.setattr("penstock.runtime.timed.exchange_hosts", lambda *_: group_by_host(machine))
        return shared_cores(transport)

    assert run_ranks(4, lambda at: of_two_machines(at, "aabb")) == [(2, 2)] * 4
    assert run_ranks(4, lambda at: of_two_machines(at, "abab")) == [(0, 1)] * 4


def test_processor_time_is_that_of_the_process_and_a_part_of_the_interrupts(monkeypatch):
    clocks = iter([1.0, 1.5])
    monkeypatch.setattr("penstock.runtime.timed.process_time", lambda: next(clocks))
    packets = iter([10.0, 10.25])
    monkeypatch.setattr("penstock.runtime.timed.packet_seconds", lambda: next(packets))
    ((answer, used),) = run_ranks(1, lambda at: CoreClock(at).seconds(lambda: "done"))
    assert (answer, used) == ("done", 0.75)


def test_a_pipeline_is_measured_with_the_blocks_that_training_gives_it(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(64)))  # a core for every rank
    network = Network(workers=3, alpha_seconds=1e-4, beta_seconds_per_byte=1e-9, gamma_seconds_per_byte=0.0)
    made = []

    class Kept(Communicator):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    def blocks(given):
        """Return the elements of the largest all-reduce that was measured, and those of its largest message."""
        made.clear()
        run_ranks(3, lambda transport: measure_line(transport, "linear_pipeline", 1.0, given, most_nbytes=1 << 20))
        parts = [prepared.part.instructions for prepared in made[0]._prepared.values()]
        largest = max(parts, key=lambda part: max((one.read or one.write).stop for one in part))
        slices = [one.read or one.write for one in largest]
        return max(each.stop for each in slices), max(each.numel for each in slices)

    monkeypatch.setattr(measuring, "Communicator", Kept)
    numel, chosen = blocks(network)
    wanted = best_block_nbytes(network, 3, 4 * numel) / 4
    assert wanted < numel / 2
    assert 0.9 * wanted < chosen <= wanted + 1
    assert blocks(None)[1] <= DEFAULT_BLOCK_NBYTES / 4 < 0.9 * wanted
