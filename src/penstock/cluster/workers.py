"""The command line of each worker: into its host's namespace, with what `torchrun` would put in its environment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cluster.gpus import SharedGpu
from penstock.cluster.layout import Host, Layout, namespace_path
from penstock.cluster.links import NIC

MASTER_PORT = 29500  # always free: the host's ports are its own
# Run by sh in a mount and a host name space of its own, so that name, /etc/hosts and the NICs in /sys change for this
# worker alone. A container that may not mount /sys shows its own NICs there.
AS_HOST = (
    'mount -t sysfs sysfs /sys 2> /dev/null; echo "$0" > /proc/sys/kernel/hostname; mount --bind "$1" /etc/hosts; '
    'shift; exec "$@"'
)


@dataclass(frozen=True, slots=True)
class Worker:
    """One process to start."""

    rank: int
    argv: tuple[str, ...]


def plan_workers(
    layout: Layout,
    hosts_file: Path,
    command: Sequence[str],
    per_host: int = 1,
    extra: Mapping[str, str] | None = None,
    gpu: SharedGpu | None = None,
) -> list[Worker]:
    """Return one worker per rank; ranks of a host are consecutive."""
    workers = []
    for host in layout.hosts:
        for local_rank in range(per_host):
            environment = rank_environment(layout, host, local_rank, per_host, gpu) | dict(extra or {})
            settings = [f"{name}={value}" for name, value in environment.items()]
            argv = [*enter_host(host.namespace, hosts_file), "env", *settings, *command]
            workers.append(Worker(host.index * per_host + local_rank, tuple(argv)))
    return workers


def enter_host(namespace: str, hosts_file: Path) -> tuple[str, ...]:
    """Return the command that runs what follows it on a host, under the host's own name."""
    own = ("unshare", "--uts", "--mount", "--propagation", "slave", "--")
    return ("nsenter", f"--net={namespace_path(namespace)}", *own, "sh", "-c", AS_HOST, namespace, str(hosts_file))


def hosts_lines(layout: Layout) -> str:
    """Return an /etc/hosts that knows every host, so that names resolve without asking outside.

    Each address also in its IPv6 form: c10d looks up its peers that way, and warns where it finds nothing.
    """
    known = [("127.0.0.1", "localhost"), *((host.address, host.namespace) for host in layout.hosts)]
    return "".join(f"{address} {name}\n::ffff:{address} {name}\n" for address, name in known)


def rank_environment(
    layout: Layout, host: Host, local_rank: int, per_host: int, gpu: SharedGpu | None = None
) -> dict[str, str]:
    """Return `torchrun`'s variables for one worker, and those of a shared GPU."""
    rank = host.index * per_host + local_rank
    environment = common_environment(layout) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(host.index),
        "WORLD_SIZE": str(len(layout.hosts) * per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
    }
    return environment if gpu is None else environment | gpu.environment(layout.slot, rank)


def common_environment(layout: Layout) -> dict[str, str]:
    """Return the variables that are the same for every worker.

    One compute thread per worker, because the hosts share this machine's cores; `--env OMP_NUM_THREADS=4` overrides.
    """
    return {
        "GROUP_WORLD_SIZE": str(len(layout.hosts)),
        "MASTER_ADDR": layout.hosts[0].address,
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": NIC,
        "NCCL_SOCKET_IFNAME": NIC,
        "NCCL_IB_DISABLE": "1",  # InfiniBand of this machine would pass by the emulated links
        "TP_SOCKET_IFNAME": NIC,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # output goes through a pipe and should still appear line by line
        "PENSTOCK_CLUSTER_SLOT": str(layout.slot),
    }
