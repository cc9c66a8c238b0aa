"""Where torch's ranks meet: the process group that the environment describes, with nothing open that need not be.

torch's store listens on all interfaces, whatever address the ranks meet at. Where that address is this machine's own
(127.0.0.1), the store is given a socket that is bound to it.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # its stubs hide them

_WAITING = 2048  # connections that may wait to be accepted, as torch has it


def join_group(backend: str) -> None:
    """Make the default process group from torchrun's variables; on loopback, rank 0's store listens there only."""
    where = _on_loopback(os.environ)
    if where is None:
        dist.init_process_group(backend)
        return
    rank, world_size, address, port = where
    listener = _listen(address, port) if rank == 0 else None
    store = TCPStore(
        address,
        port,
        world_size,
        is_master=rank == 0,
        timeout=dist.default_pg_timeout,
        master_listen_fd=listener,
    )
    dist.init_process_group(backend, store=PrefixStore("default_pg", store), rank=rank, world_size=world_size)


def _on_loopback(environment: Mapping[str, str]) -> tuple[int, int, str, int] | None:
    """Return rank, world size, address and port where the ranks make a store of their own at a loopback address."""
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in environment for name in wanted) or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None  # torch says what is missing, or torchrun has made the store
    rank, world_size, address, port = (environment[name] for name in wanted)
    if address == "localhost":
        address = "127.0.0.1"
    try:
        is_loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return None
    return (int(rank), int(world_size), address, int(port)) if is_loopback else None


def _listen(address: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_WAITING).detach()
