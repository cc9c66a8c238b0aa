"""Who is where: names, addresses and racks of an emulated cluster, from its slot number alone.

A machine holds up to 512 clusters at once, each in its own slot. Everything a cluster makes carries the slot in its
name (`penstock-7-host0`), and its hosts live in a subnet of their own within 198.18.0.0/15, the range set aside for
benchmarks of network devices. Nothing is made in the machine's own network namespace: the switch has a namespace too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ClusterError

SLOTS = 512  # subnets of 256 addresses in 198.18.0.0/15
MAX_HOSTS = 250
NAMESPACE_DIRECTORY = Path("/run/netns")  # where iproute2 keeps them too: `ip netns list` shows ours
NAMESPACE = re.compile(r"penstock-(\d+)-(switch|host\d+)")


@dataclass(frozen=True, slots=True)
class Host:
    """One emulated machine: a network namespace with one NIC, called `eth0` inside."""

    index: int
    namespace: str  # also its hostname
    address: str  # IPv4, without the prefix length
    port: str  # the switch's end of its cable, in the switch's namespace
    rack: int  # number of the switch it hangs on
    bits_per_second: int | None  # of its NIC, each direction; None is unshaped


@dataclass(frozen=True, slots=True)
class Layout:
    """An emulated cluster on paper."""

    slot: int
    hosts: tuple[Host, ...]
    racks: int  # 1: one switch; more: a switch per rack and a core switch above them
    uplink_bits_per_second: int | None  # of each rack's cable to the core, each direction; None is unshaped

    @property
    def switch(self) -> str:
        """Name of the namespace that holds every switch."""
        return f"penstock-{self.slot}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Names of all its namespaces."""
        return (self.switch, *(host.namespace for host in self.hosts))


def plan_layout(
    slot: int, rates: Sequence[int | None], racks: int = 1, uplink_bits_per_second: int | None = None
) -> Layout:
    """Lay out one host per rate; racks hold consecutive hosts, as evenly as possible."""
    if not 1 <= len(rates) <= MAX_HOSTS:
        raise ClusterError(f"{len(rates)} hosts: wanted 1 to {MAX_HOSTS}")
    if not 1 <= racks <= len(rates):
        raise ClusterError(
            f"{racks} racks for {len(rates)} hosts: wanted 1 to {len(rates)}; an uplink joins two or more"
        )
    hosts = tuple(
        Host(
            index=index,
            namespace=f"penstock-{slot}-host{index}",
            address=f"198.{18 + slot // 256}.{slot % 256}.{index + 1}",
            port=f"port{index}",
            rack=index * racks // len(rates),
            bits_per_second=rate,
        )
        for index, rate in enumerate(rates)
    )
    return Layout(slot, hosts, racks, uplink_bits_per_second)


def namespace_path(namespace: str) -> Path:
    """Return the file that a namespace is entered by."""
    return NAMESPACE_DIRECTORY / namespace


def slot_of(namespace: str) -> int | None:
    """Return the slot whose cluster made this namespace, or None where it is not ours.

    >>> slot_of("penstock-7-host0")
    7
    """
    match = NAMESPACE.fullmatch(namespace)
    return None if match is None else int(match[1])
