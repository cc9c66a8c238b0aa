"""Measures the network of a process group as training uses it, once per cluster where a folder keeps the results.

A measurement holds for the hosts, the engine and the number of workers it was made with; that is what its file is
called by. Rank 0 looks it up and everybody gets what it found.
"""

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.network import Network, load_network, save_network
from penstock.plan import Route
from penstock.runtime.hosts import Nodes
from penstock.runtime.measure import LARGEST, NATIVE, measure_lines, measure_network
from penstock.runtime.transport import Transport
from penstock.runtime.transport.c10d import C10dTransport
from penstock.torch.device_measure import measure_all_reduce, measure_device_network, measure_route
from penstock.torch.engines import mpi_transport, own_transport, release
from penstock.torch.nodes import nodes_of
from penstock.torch.together import together

HOST_ENGINES = ("gloo", "mpi")  # take host memory; others move only their own device's
__all__ = ["Cluster", "cluster_of", "measure", "measurement_path", "with_lines"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a measurement holds for."""

    hosts: tuple[str, ...]  # names of the ranks' hosts, in order
    engine: str  # gloo, nccl, ...
    device: str  # cpu or cuda
    workers: int
    nodes: Nodes = ()  # the ranks of each host: emulated hosts and containers may have the same name

    @property
    def digest(self) -> str:
        """A short name for files."""
        text = json.dumps([self.hosts, self.engine, self.device, self.workers, self.nodes])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def engine_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that moves memory of `device` in a group, which may have one for each kind of device."""
    backends = dict(item.split(":", 1) for item in dist.get_backend_config(group).split(","))
    return backends.get(device.type, dist.get_backend(group))


def cluster_of(group: dist.ProcessGroup, device: torch.device, engine: str | None = None) -> Cluster:
    """Return the cluster of a process group; every rank must call this at the same time."""
    hosts: list[str] = [""] * dist.get_world_size(group)
    with together("gathering the names of hosts", group):
        dist.all_gather_object(hosts, platform.node(), group=group)
    return Cluster(tuple(hosts), engine or engine_of(group, device), device.type, len(hosts), nodes_of(group))


def measurement_path(folder: str | Path, cluster: Cluster) -> Path:
    """Return where the measurement of a cluster is kept."""
    return Path(folder) / f"network-{cluster.engine}-{cluster.workers}-{cluster.digest}.json"


def measure(
    group: dist.ProcessGroup,
    routes: Sequence[Route],
    device: torch.device,
    folder: str | Path | None = None,
    seconds: float = 4.0,
    engine: str | None = None,
    most_nbytes: int = LARGEST,
) -> Network:
    """Return the group's network with a line for each of `routes`; every rank must call this at the same time.

    `engine` is what carries gradients, where that is not the group itself (`engines.py`).
    No dense message above 16 MiB is larger than `most_nbytes`, so that a rank has the memory for it.
    With a `folder`, a measurement made there before is taken if it has all lines, and a new one is kept.
    """
    if folder is None:
        return _measure(group, routes, device, seconds, engine, most_nbytes)
    cluster = cluster_of(group, device, engine)
    path = measurement_path(folder, cluster)
    known = _shared(_load(path, routes) if dist.get_rank(group) == 0 else None, group)
    if known is not None:
        return known
    network = _measure(group, routes, device, seconds, engine, most_nbytes)
    _keep(network, folder, cluster, group)
    return network


def with_lines(
    network: Network,
    group: dist.ProcessGroup,
    routes: Sequence[Route],
    device: torch.device,
    seconds: float = 2.0,
    engine: str | None = None,
    folder: str | Path | None = None,
) -> Network:
    """Return a network with the lines of compressed routes that it lacks, measured on all ranks.

    A `folder` keeps it, as `measure` does.
    """
    missing = [route for route in routes if route.codec and str(route) not in network.all_reduce]
    if not missing or (device.type != "cuda" and dist.get_world_size(group) == 1):
        return network
    if device.type == "cuda":
        network = _with_device_lines(network, group, missing, device, seconds, engine)
    else:
        transport = _host_transport(group, engine)
        fits = measure_lines(transport, [str(route) for route in missing], seconds)
        release(transport)
        network = replace(network, all_reduce={**network.all_reduce, **{name: fit.line for name, fit in fits.items()}})
    if folder is not None:
        _keep(network, folder, cluster_of(group, device, engine), group)
    return network


def _measure(
    group: dist.ProcessGroup,
    routes: Sequence[Route],
    device: torch.device,
    seconds: float,
    engine: str | None,
    most_nbytes: int,
) -> Network:
    """Measure our own routes of gradients on a GPU from there, codecs too, which cost one worker as much."""
    alone = dist.get_world_size(group) == 1
    there = [route for route in routes if _is_ours_on_a_gpu(route, device) and (route.codec or not alone)]
    others = [route for route in routes if route not in there]
    share, codecs = seconds / 2 if there else seconds, _codecs(routes)
    network = _measure_rest(group, others, codecs, device, share, engine, most_nbytes)
    return _with_device_lines(network, group, there, device, share, engine)


def _codecs(routes: Sequence[Route]) -> list[str]:
    return list(dict.fromkeys(route.codec for route in routes if route.codec))


def _is_ours_on_a_gpu(route: Route, device: torch.device) -> bool:
    return device.type == "cuda" and route != Route(NATIVE)


def _with_device_lines(
    network: Network,
    group: dist.ProcessGroup,
    routes: Sequence[Route],
    device: torch.device,
    seconds: float,
    engine: str | None,
) -> Network:
    if not routes:
        return network
    transport = _host_transport(group, engine)
    lines = {str(route): measure_route(group, transport, device, route, seconds / len(routes)) for route in routes}
    release(transport)
    return replace(network, all_reduce={**network.all_reduce, **lines})


def _measure_rest(
    group: dist.ProcessGroup,
    routes: Sequence[Route],
    codecs: Sequence[str],
    device: torch.device,
    seconds: float,
    engine: str | None,
    most_nbytes: int,
) -> Network:
    """Measure the engine on the device it moves memory of, and our routes in host memory, where they run."""
    if engine is not None:  # it takes host memory, whatever the device
        return _measure_host(mpi_transport(group), routes, codecs, seconds, most_nbytes)
    if engine_of(group, device) not in HOST_ENGINES:
        network = measure_device_network(group, device, seconds)
        ours = [route for route in routes if route != Route(NATIVE)]
        lines = _measure_host(_host_transport(group), ours, codecs, seconds, most_nbytes).all_reduce if ours else {}
        return replace(network, all_reduce={**network.all_reduce, **lines})
    network = _measure_host(C10dTransport(group), routes, codecs, seconds, most_nbytes)
    if device.type != "cpu" and Route(NATIVE) in routes:
        lines = {**network.all_reduce, NATIVE: measure_all_reduce(group, device, seconds / 4)}
        return replace(network, all_reduce=lines)
    return network


def _measure_host(
    transport: Transport, routes: Sequence[Route], codecs: Sequence[str], seconds: float, most_nbytes: int
) -> Network:
    names = [str(route) for route in routes]
    measured = measure_network(transport, seconds=seconds, strategies=names, codecs=codecs, most_nbytes=most_nbytes)
    release(transport)
    return measured.network


def _host_transport(group: dist.ProcessGroup, engine: str | None = None) -> Transport:
    """Return what moves host memory between the ranks of a group."""
    if engine is None and engine_of(group, torch.device("cpu")) in HOST_ENGINES:
        return C10dTransport(group)
    return own_transport(engine, group)


def _keep(network: Network, folder: str | Path, cluster: Cluster, group: dist.ProcessGroup) -> None:
    """Write a measurement down, on rank 0."""
    if dist.get_rank(group) == 0:
        path = measurement_path(folder, cluster)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_network(network, path)


def _load(path: Path, routes: Sequence[Route]) -> Network | None:
    """Return what a file has, None where there is none or it lacks a line."""
    network = load_network(path) if path.exists() else None
    return network if network and all(str(route) in network.all_reduce for route in routes) else None


def _shared(network: Network | None, group: dist.ProcessGroup) -> Network | None:
    box = [network]
    with together("sharing what was measured", group):
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
