"""What each process of a test does whose ranks are on several hosts: so they are told, in one process group."""

from dataclasses import replace
from typing import Any

from penstock.curves import CodecCurves, Curve
from penstock.network import LinearCost, Network
from penstock.planning.agree import nodes_of
from penstock.planning.measurement_cache import cluster_of
from penstock.runtime import hosts as places
from penstock.torch.collective_errors import GroupRanks
from torch_compressed import _echo

HERE = "aba"  # hosts of the ranks: uneven, and not in the order of the ranks
LOCAL = "hierarchical(outer=ring)"


def network(codec: str, ring_seconds: float, local_seconds: float) -> Network:
    """Return measured lines by which a message takes so long, by a ring or summed inside hosts first."""
    names = ("ring", "parameter_server", "all_gather")
    lines = {"native": LinearCost(1.0, 0.0), "ring": LinearCost(1.0, 0.0), "recursive_doubling": LinearCost(1.0, 0.0)}
    lines |= {f"{name}+{codec}": LinearCost(ring_seconds, 0.0) for name in names}
    lines |= {f"ring+{codec}/{pieces}": LinearCost(ring_seconds, 0.0) for pieces in (2, 12)}
    lines |= {f"{name}+{codec}": LinearCost(local_seconds, 0.0) for name in ("hierarchical", LOCAL)}
    curves = CodecCurves(1 / 32, Curve(1e-12, 1e-9), Curve(1e-12, 1e-9))
    return Network(len(HERE), 1e-4, 1e-9, 1e-10, lines, {"onebit": curves})


def on_hosts(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train `Echo` by each case's wrapper; return what came of it, and the nodes that were found."""
    import torch.distributed as dist

    places.network_namespace = lambda: ord(HERE[rank])
    group = dist.group.WORLD
    assert group is not None
    cluster = cluster_of(GroupRanks(group), "cpu", "gloo")
    files = {cluster.digest, replace(cluster, nodes=()).digest}  # of its measurements: others than on one host
    found = {name: _echo(rank, case | {"profile_iterations": 2}, steps=4) for name, case in cases.items()}
    return {"nodes": nodes_of(GroupRanks(group)), "files": len(files), "cases": found}
