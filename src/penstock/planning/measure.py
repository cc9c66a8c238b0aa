"""Measures the network of some ranks as training uses it: its links, and one line per route.

`survey.py` says which routes, and for how long. Gradients on a GPU are measured there (`torch/device_measure.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from penstock.codecs.registry import is_low_rank
from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.planning.agree import Ranks
from penstock.runtime.measure_codecs import measure_codecs
from penstock.runtime.measure_network import link_holds, measure_line, measure_links
from penstock.runtime.transport import Transport

_CURVES_SHARE = 0.25  # of a line's budget, for the curves of a codec that has none yet


class Gauge(Protocol):
    """What a survey asks of what measures; all ranks make the same calls at the same time, and get the same."""

    ranks: Ranks
    engine: str  # what carries gradients, by name: gloo, mpi, nccl, memory
    device: str  # where gradients lie: cpu or cuda

    def links(self, seconds: float) -> Network:
        """Return a network without lines: alpha, beta and gamma."""

    def holds(self, network: Network) -> bool:
        """Say whether the links are still what a network says that was measured before."""

    def with_line(self, network: Network, route: Route, seconds: float) -> Network:
        """Return the network with the line of a route, and with the curves of its codec where they are of use."""

    def close(self) -> None:
        """Give back what carried the messages."""


class HostGauge:
    """Measures an engine that moves host memory, on gradients that lie there."""

    device = "cpu"

    def __init__(self, ranks: Ranks, engine: str, connect: Callable[[], Transport], most_nbytes: int = 0) -> None:
        """`connect` is called when the first message is to be sent; dense ones above `most_nbytes` are left out."""
        self.ranks, self.engine, self._connect, self._most_nbytes = ranks, engine, connect, most_nbytes
        self._transport: Transport | None = None

    def links(self, seconds: float) -> Network:
        """Return a network without lines: alpha, beta and gamma."""
        return measure_links(self.transport, seconds=seconds).network

    def holds(self, network: Network) -> bool:
        """Say whether the links are still what a network says that was measured before."""
        return link_holds(self.transport, network)

    def with_line(self, network: Network, route: Route, seconds: float) -> Network:
        """Return the network with the line of a route and the curves of its codec; one worker sends nothing.

        Factors have no curves: nothing is encoded.
        """
        if self.ranks.world_size == 1:
            return network
        if route.codec is not None and route.codec not in network.codecs and not is_low_rank(route.codec):
            curves = measure_codecs([route.codec], self.transport, _CURVES_SHARE * seconds)
            network, seconds = replace(network, codecs={**network.codecs, **curves}), (1 - _CURVES_SHARE) * seconds
        line = measure_line(self.transport, str(route), seconds, network, most_nbytes=self._most_nbytes).line
        return with_line(network, route, line)

    def close(self) -> None:
        """Forget what carried the messages, which is the caller's."""
        self._transport = None

    @property
    def transport(self) -> Transport:
        """What moves host memory between the ranks."""
        self._transport = self._transport or self._connect()
        return self._transport


def with_line(network: Network, route: Route, line: LinearCost) -> Network:
    """Return a network with one more measured line."""
    return replace(network, all_reduce={**network.all_reduce, str(route): line})
