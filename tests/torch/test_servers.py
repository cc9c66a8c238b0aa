"""Ranks that only aggregate beside ranks that train: the same averages, nothing lost, and pushes beside pulls."""

import signal
import threading

import numpy as np
import pytest
import torch

import torch_cuda
import torch_servers as ranks
from penstock.exchange.exchange import Exchange
from penstock.plan import Route
from penstock.runtime.communicator import Communicator
from runtime.threads import run_ranks
from spawn import spawn, spawn_outcomes

DENSE = "parameter_server(servers=1, dedicated=true)"
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_GPU = (pytest.mark.gpu, NEEDS_GPU)


def test_two_workers_with_two_servers_have_the_bits_of_two_workers():
    """A sum of two is the same in any order, and averages are over those that train."""
    wanted = spawn(2, ranks.alone, {"planner": "wfbp"})
    found = spawn(4, ranks.served, 2, {"planner": "wfbp"})
    assert found[2:] == ["served", "served"]
    for rank in (0, 1):
        assert found[rank]["used"] == ["parameter_server(servers=2, dedicated=true)"]
        for mine, theirs in zip(found[rank]["weights"], wanted[0]["weights"], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("options", [{}, {"dense_below": 100}, {"on_nonfinite": "skip"}, {"bulk": False}], ids=str)
def test_nothing_is_lost_between_workers_servers_and_a_checkpoint(options):
    """What was applied and what is owed, servers' part handed to rank 0, is what was computed."""
    found = spawn(3, ranks.conserved, 1, {"codec": "onebit"} | options)
    check_conserved(found)
    assert found[0]["resumed"] == found[1]["resumed"] == found[0]["unbroken"]


def check_conserved(found):
    assert found[2] == "served"
    for name, (applied, computed) in found[0]["sums"].items():
        owed = sum(each["owed"].get(name, 0.0) for each in found[:2])
        np.testing.assert_allclose(applied + owed, computed, rtol=0, atol=2e-5)
        np.testing.assert_array_equal(applied, found[1]["sums"][name][0])


@pytest.mark.gpu
@NEEDS_GPU
def test_workers_on_a_gpu_have_with_a_server_without_one_the_bits_of_the_cpu():
    """Dense sums of two are the same everywhere."""
    there, here = (spawn(3, ranks.conserved, 1, {}, device, seconds=60.0) for device in ("cuda", "cpu"))
    for rank in (0, 1):
        assert there[rank]["unbroken"] == there[rank]["resumed"] == here[rank]["unbroken"]


@pytest.mark.gpu
@NEEDS_GPU
def test_nothing_is_lost_between_workers_on_a_gpu_and_a_server_without_one():
    pytest.importorskip("numba", reason="the server encodes in host memory")
    found = spawn(3, ranks.conserved, 1, {"codec": "onebit"}, "cuda", seconds=60.0)
    check_conserved(found)
    assert found[0]["resumed"] == found[1]["resumed"] == found[0]["unbroken"]


@pytest.mark.root
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=ON_GPU)])
def test_hosts_that_train_on_a_shared_gpu_have_a_server_on_a_host_without_one(device):
    """Torch's own collectives are NCCL's there; dense sums of two ranks are the same everywhere."""
    wanted = spawn(3, torch_cuda.served, "cpu", "gloo")
    assert torch_cuda.on_hosts(3, device, "served", "dense")["dense"] == [torch_cuda.digest(each) for each in wanted]


def test_buckets_of_a_device_which_are_in_one_lane_meet_those_of_the_server():
    """On a GPU one thread averages all buckets; a server that dealt them out to lanes would wait for other messages."""
    check_lane(spawn(3, ranks.in_one_lane))


@pytest.mark.parametrize("codec", ["onebit", "topk(density=0.25)", "sparse(density=0.05)"])
def test_ranks_whose_codec_works_on_a_device_have_a_server_without_one(codec):
    """They keep one program for buckets of one size, the server one for each; payloads of top-k, which vary in size,
    lie otherwise on a device, so that these ranks encode them in host memory."""
    pytest.importorskip("triton", reason="install penstock[gpu] to test codecs on a device")
    check_lane(spawn(3, ranks.in_one_lane, codec))


def check_lane(found):
    (applied, owed), (other, other_owed), served = found
    assert served == "served"
    np.testing.assert_array_equal(applied, other)
    computed = sum(ranks.gradients(rank, step) for rank in (0, 1) for step in (0, 1)).numpy() / 2
    np.testing.assert_allclose(applied + owed + other_owed, computed, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"codec": "blocks(bits=4)"}], ids=str)
def test_servers_take_part_in_measuring(options):
    one, other, served = spawn(3, ranks.served, 1, {"planner": "exact", "measurements": None} | options, True)
    assert served == "served"
    assert one["used"][0].startswith(DENSE)
    for mine, theirs in zip(one["weights"], other["weights"], strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_server_whose_workers_are_gone_says_so():
    assert "rank 0" in spawn(3, ranks.left_alone)[2]


def test_a_server_that_cannot_go_on_keeps_none_waiting():
    """It fails on a communication thread, while it waits for rank 0's next word."""
    one, other, server = (outcome.value for outcome in spawn_outcomes(3, ranks.broken, seconds=60.0))
    assert server == "OSError: this server is out of memory"
    for said in (one, other):
        assert said.startswith("TransportError")
        assert "rank 2" in said


@pytest.mark.parametrize("word", ["begin", "start"])
def test_a_server_that_died_is_named_by_all_others(word):
    for said in (outcome.value for outcome in spawn_outcomes(3, ranks.killed, word, seconds=60.0)[:2]):
        assert "rank 2" in said


TIMEOUT_SECONDS = 6.0  # of the process group
BUSY_SECONDS = 15.0  # beyond the timeout, for a machine with other work


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=lambda each: each.name)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_gone_is_named_by_workers_and_server_within_the_timeout(victim, what):
    """A server waits for rank 0 and is waited for by all: it must not be taken for the dead one."""
    ended = spawn_outcomes(3, ranks.lost, victim, what, seconds=90.0, timeout=TIMEOUT_SECONDS, stopped=victim)
    check_named(ended, victim)


def check_named(ended, victim):
    for rank in {0, 1, 2} - {victim}:
        said, seconds = ended[rank].value
        assert f"rank {victim} did not answer" in said, f"rank {rank}"
        assert not any(f"rank {other} did not" in said for other in {0, 1, 2} - {victim}), f"rank {rank}"
        if rank != 2:  # it began to count when it began to serve
            assert seconds < TIMEOUT_SECONDS + BUSY_SECONDS


def test_a_server_waits_for_workers_that_sleep_for_longer_than_a_message_may_take():
    ended = spawn_outcomes(3, ranks.sleepy, 3 * TIMEOUT_SECONDS, seconds=90.0, timeout=TIMEOUT_SECONDS)
    assert [each.value for each in ended] == ["trained", "trained", "served"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"strategy": "ring"},
            "servers= with strategy 'ring': servers are a strategy, over gloo; leave one of the two",
        ),
        ({"process_group": "some"}, "servers= and a process group; leave that out: it is servers.workers"),
        (
            {"codec": "onebit", "grad_scaler": True},
            "servers= with grad_scaler= and a codec: residuals of servers do not follow its scale",
        ),
        (
            {"codec": "lowrank(rank=4)"},
            "servers= with codec 'lowrank(rank=4)': servers do not know the shapes that it factors; leave one out",
        ),
        (
            {"servers": None, "strategy": DENSE},
            "its last 1 ranks only aggregate, and 0 of these are made servers; wanted DDP(servers=ParameterServers(1))",
        ),
        ({"count": 2}, "2 parameter servers; wanted at least 1, and at least one that trains of 2 ranks"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(options, words):
    assert words in spawn(2, ranks.refused, options)[0]


class Gated:
    """A server's engine: what it sends in lane 0 waits until something has come in lane 1."""

    def __init__(self, transport, gate, lane=0):
        self._transport, self._gate, self._lane = transport, gate, lane

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def lane(self, number):
        return Gated(self._transport.lane(number), self._gate, number)

    def isend(self, view, peer, tag):
        if self._lane == 0 and self._gate.is_armed:
            assert self._gate.came.wait(30), "nothing is pushed in lane 1 before what is pulled in lane 0 has arrived"
        return self._transport.isend(view, peer, tag)

    def irecv(self, view, peer, tag):
        work = self._transport.irecv(view, peer, tag)
        return Noting(work, self._gate) if self._lane == 1 else work


class Noting:
    def __init__(self, work, gate):
        self._work, self._gate = work, gate

    def wait(self, seconds):
        self._work.wait(seconds)
        if self._gate.is_armed:
            self._gate.came.set()


class Gate:
    def __init__(self):
        self.is_armed, self.came = False, threading.Event()


def test_a_bucket_is_pushed_while_another_waits_to_be_pulled():
    """The server lets the first bucket's sums go only once a push of the second has come: one by one, it would hang."""
    gate = Gate()

    def rank(transport):
        is_server = transport.rank == 2
        communicator = Communicator(Gated(transport, gate) if is_server else transport, timeout_seconds=60.0)
        exchange = Exchange(communicator, route=Route(DENSE), lanes=2, servers=1)
        buckets = [exchange.bucket([name], [1000]) for name in ("first", "second")]
        for step in range(2):
            if is_server and step == 1:  # once ranks have compared what they are to do
                gate.is_armed = True
            exchange.begin()
            values = [np.full(1000, 0.0 if is_server else 1.0 + transport.rank + step, np.float32) for _ in buckets]
            for handle in [exchange.start(*each) for each in zip(buckets, values, strict=True)]:
                exchange.wait(handle)
        exchange.close()
        return values

    for found in run_ranks(3, rank)[:2]:
        for each in found:
            np.testing.assert_array_equal(each, np.full(1000, 2.5, np.float32))
    assert gate.came.is_set()
