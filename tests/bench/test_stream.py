"""Alpha and beta of messages in a stream, on a made-up link that is known exactly."""

import pytest

from penstock.bench.stream import latency_seconds, stream_network
from runtime.threads import run_ranks

LATENCY_SECONDS, BUSY_SECONDS, BETA = 3e-3, 4e-4, 3e-9


class Wire:
    """One rank whose messages arrive one after another: each holds the wire a little, and comes late by a latency."""

    rank, world_size = 0, 4

    def __init__(self):
        self.now = 0.0  # of a clock that only waiting moves
        self.free = 0.0  # when the wire is

    def isend(self, view, peer, tag):
        return Until(self, 0.0)

    def irecv(self, view, peer, tag):
        self.free = max(self.free, self.now) + BUSY_SECONDS + BETA * view.nbytes
        return Until(self, self.free + LATENCY_SECONDS)

    def native(self, collective, values, dtype, root, seconds):
        """Agree with nobody."""


class Until:
    def __init__(self, wire, moment):
        self.wire, self.moment = wire, moment

    def wait(self, seconds):
        self.wire.now = max(self.wire.now, self.moment)


def test_latency_hides_in_a_stream_and_shows_in_a_ping_pong(monkeypatch):
    wire = Wire()
    monkeypatch.setattr("penstock.bench.stream.perf_counter", lambda: wire.now)
    network = stream_network(wire, "wire")
    assert network.beta_seconds_per_byte == pytest.approx(BETA, rel=0.15)
    # four in flight: a fourth of the latency shows where the wire is idle in between, nothing of it where it is not
    assert network.alpha_seconds < (LATENCY_SECONDS + BUSY_SECONDS) / 2
    assert latency_seconds(wire) == pytest.approx((LATENCY_SECONDS + BUSY_SECONDS) / 2, rel=0.01)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_agree(world_size):
    found = run_ranks(world_size, lambda transport: (stream_network(transport, "memory"), latency_seconds(transport)))
    assert all(one == found[0] for one in found)
    assert found[0][0].workers == world_size
