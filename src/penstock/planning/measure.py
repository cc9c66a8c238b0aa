"""Measures the network of a process group as training uses it: its links, and one line per route.

The engine is measured on the device that it moves memory of, our own routes where they run: in host memory, or from a
GPU and back, codec and all. `survey.py` says which routes, and for how long.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from penstock.network import Network
from penstock.plan import Route
from penstock.runtime.measure_codecs import measure_codecs
from penstock.runtime.measure_network import NATIVE, link_holds, measure_line, measure_links
from penstock.runtime.transport import Transport
from penstock.runtime.transport.c10d import C10dTransport
from penstock.torch.device_measure import device_link_holds, measure_all_reduce, measure_device_links, measure_route
from penstock.torch.engines import own_transport, release

HOST_ENGINES = ("gloo", "mpi")  # take host memory; others move only their own device's
_CURVES_SHARE = 0.25  # of a line's budget, for the curves of a codec that has none yet


def engine_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that moves memory of `device` in a group, which may have one for each kind of device."""
    backends = dict(item.split(":", 1) for item in dist.get_backend_config(group).split(","))
    return backends.get(device.type, dist.get_backend(group))


class Gauge:
    """Measures a group's network; every rank must make the same calls at the same time, and all get the same."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, engine: str | None = None, most_nbytes: int = 0
    ) -> None:
        """`engine` carries gradients, None: the group; dense messages of more than `most_nbytes` are left out."""
        self.group, self.device, self.engine, self._most_nbytes = group, device, engine, most_nbytes
        self._transport: Transport | None = None

    @property
    def workers(self) -> int:
        """The ranks of the group."""
        return dist.get_world_size(self.group)

    @property
    def engine_name(self) -> str:
        """What carries gradients, by name."""
        return self.engine or engine_of(self.group, self.device)

    def links(self, seconds: float) -> Network:
        """Return a network without lines: alpha, beta and gamma."""
        if self._is_host_engine:
            return measure_links(self._host, seconds=seconds).network
        return measure_device_links(self.group, self.device, seconds)

    def holds(self, network: Network) -> bool:
        """Say whether the links are still what a network says that was measured before."""
        if self._is_host_engine:
            return link_holds(self._host, network)
        return device_link_holds(self.group, self.device, network)

    def with_line(self, network: Network, route: Route, seconds: float) -> Network:
        """Return the network with the line of a route, and with the curves of its codec where they are of use.

        One worker sends nothing; what its codec costs is measured on a GPU, where that runs beside the model.
        """
        on_gpu = self.device.type == "cuda"
        if self.workers == 1 and not (on_gpu and route.codec):
            return network
        if on_gpu and route != Route(NATIVE):
            line = measure_route(self.group, self._host, self.device, route, seconds)
        elif on_gpu and self.engine is None:
            line = measure_all_reduce(self.group, self.device, seconds)
        else:
            network, seconds = self._with_curves(network, route, seconds)
            line = measure_line(self._host, str(route), seconds, most_nbytes=self._most_nbytes).line
        return replace(network, all_reduce={**network.all_reduce, str(route): line})

    def close(self) -> None:
        """Give back what carried the messages; every rank must call this at the same time."""
        if self._transport is not None:
            release(self._transport)
            self._transport = None

    def _with_curves(self, network: Network, route: Route, seconds: float) -> tuple[Network, float]:
        """Return the network with the curves of the route's codec, and what is left of the budget."""
        if route.codec is None or route.codec in network.codecs:
            return network, seconds
        curves = measure_codecs([route.codec], self._host, _CURVES_SHARE * seconds)
        return replace(network, codecs={**network.codecs, **curves}), (1 - _CURVES_SHARE) * seconds

    @property
    def _is_host_engine(self) -> bool:
        return self.engine_name in HOST_ENGINES

    @property
    def _host(self) -> Transport:
        """What moves host memory between the ranks, made when it is first needed."""
        if self._transport is None:
            shared = self.engine is None and engine_of(self.group, torch.device("cpu")) in HOST_ENGINES
            self._transport = C10dTransport(self.group) if shared else own_transport(self.engine, self.group)
        return self._transport
