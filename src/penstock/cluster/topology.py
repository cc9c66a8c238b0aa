"""Names, addresses, racks and rates of an emulated cluster, from its slot number and what the user wrote.

A machine holds up to 512 clusters at once, each in its own slot. Everything a cluster makes carries the slot in its
name (`penstock-7-host0`), and its hosts live in a subnet of their own within 198.18.0.0/15, the range set aside for
benchmarks of network devices. Nothing is made in the machine's own network namespace: the switch has a namespace too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ClusterError, shorten

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
    """The hosts, racks and rates of an emulated cluster."""

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
    """Return the file through which a namespace is entered."""
    return NAMESPACE_DIRECTORY / namespace


def slot_of(namespace: str) -> int | None:
    """Return the slot whose cluster made this namespace, or None where it is not ours.

    >>> slot_of("penstock-7-host0")
    7
    """
    match = NAMESPACE.fullmatch(namespace)
    return None if match is None else int(match[1])


RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
DELAY_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
UNSHAPED = "none"
SLOWEST, FASTEST = 10**5, 10**11  # bits per second; outside, the buckets of `building.py` make no sense


def parse_rate(text: str, fastest: int = FASTEST) -> int | None:
    """Return bits per second, or None for `none`, a link without a limit; `fastest` is the most that is taken.

    >>> parse_rate("2.5gbit")
    2500000000
    """
    if text.strip().lower() == UNSHAPED:
        return None
    number, unit = _split(
        text, RATE_UNITS, f"rate {shorten(text)}: wanted a number and one of {', '.join(RATE_UNITS)}, or none"
    )
    bits_per_second = round(number * RATE_UNITS[unit])
    if not SLOWEST <= bits_per_second <= fastest:
        most = f"{fastest // 10**9}gbit"
        raise ClusterError(f"rate {shorten(text)}: wanted 100kbit to {most}, or none for no limit")
    return bits_per_second


def parse_rates(text: str, hosts: int) -> tuple[int | None, ...]:
    """Return one rate per host from `1gbit` (all the same) or `1gbit,1gbit,100mbit` (one each)."""
    rates = tuple(parse_rate(part) for part in text.split(","))
    if len(rates) == 1:
        return rates * hosts
    if len(rates) != hosts:
        raise ClusterError(f"rate {shorten(text)} names {len(rates)} hosts of {hosts}; give one rate, or one per host")
    return rates


def parse_delay(text: str) -> float:
    """Return seconds.

    >>> parse_delay("5ms")
    0.005
    """
    number, unit = _split(
        text, DELAY_UNITS, f"latency {shorten(text)}: wanted a number and one of us, ms, s, as in 5ms"
    )
    return number * DELAY_UNITS[unit]


def _split(
    text: str, units: dict[str, object] | dict[str, int] | dict[str, float], complaint: str
) -> tuple[float, str]:
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([a-z]+)\s*", text.lower())
    if match is None or match[2] not in units:
        raise ClusterError(complaint)
    return float(match[1]), match[2]
