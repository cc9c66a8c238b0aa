"""Which host a rank is on, and the ranks of each host as a value; `nodes.py` asks all ranks."""

import os
import platform
from collections.abc import Hashable, Sequence
from itertools import islice
from pathlib import Path

Nodes = tuple[tuple[int, ...], ...]  # the ranks of each host, ascending; hosts in the order of their first ranks
_SHOWN = 8  # hosts that a sentence names


def this_host() -> str:
    """Return what ranks that share a host's loopback have in common: the kernel and the network namespace.

    Names are not enough: containers on different machines may have the same one. Containers on one machine count as
    one host where they share its network, and otherwise as several: what they send one another leaves by an interface.
    """
    kernel = _kernel()
    return f"{kernel}/{network_namespace()}" if kernel else platform.node()


def this_machine() -> str:
    """Return what ranks have in common that share cores: the kernel, whatever network namespaces they are in."""
    return _kernel() or platform.node()


def _kernel() -> str:
    """Return what this start of the kernel is called; empty where there is no Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def processors() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def network_namespace() -> int:
    """Return the number of this process's network namespace, which no other has until the machine is started again."""
    return os.stat("/proc/self/ns/net").st_ino


def group_by_host(hosts: Sequence[Hashable]) -> Nodes:
    """Return the ranks that are on the same host, for each host.

    >>> group_by_host(["a", "b", "a"])
    ((0, 2), (1,))
    """
    nodes: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return tuple(map(tuple, nodes.values()))


def share_hosts(nodes: Nodes) -> bool:
    """Say whether there are several hosts, and ranks that share one: where aggregating inside first can pay."""
    return len(nodes) > 1 and any(len(node) > 1 for node in nodes)


def describe_nodes(nodes: Nodes) -> str:
    """Return the nodes in words.

    >>> describe_nodes(((0, 2), (1,), (3, 4, 5)))
    '6 ranks on 3 hosts (0, 2; 1; 3-5)'
    """
    shown = "; ".join(_ranks(node) for node in islice(nodes, _SHOWN)) + ("; ..." if len(nodes) > _SHOWN else "")
    return f"{_counted(sum(map(len, nodes)), 'rank')} on {_counted(len(nodes), 'host')} ({shown})"


def _ranks(node: Sequence[int]) -> str:
    """Return ranks as text: a range where they follow one another."""
    if len(node) > 1 and node[-1] - node[0] == len(node) - 1:
        return f"{node[0]}-{node[-1]}"
    return ", ".join(map(str, node[:_SHOWN])) + (", ..." if len(node) > _SHOWN else "")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
