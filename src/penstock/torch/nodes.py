"""The ranks of each host in a process group, as the planning side of a wrapper asks for them."""

import torch.distributed as dist

from penstock.runtime.hosts import Nodes, group_by_host, this_host
from penstock.torch.collective_errors import together


def nodes_of(group: dist.ProcessGroup) -> Nodes:
    """Return the ranks of each host; every rank must call this at the same time."""
    hosts: list[str] = [""] * dist.get_world_size(group)
    with together("gathering where ranks are", group):
        dist.all_gather_object(hosts, this_host(), group=group)
    return group_by_host(hosts)
