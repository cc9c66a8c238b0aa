"""The steps that build an emulated cluster, as data, and what they ask of this machine; `netlink.py` carries them out.

Every cable is a veth pair with a token bucket (`tbf`) at both ends, because a bucket limits what leaves an interface:
the host's end limits what the host sends, the switch's end what it receives.

A rate counts Ethernet frames as the kernel does (14-byte header, no preamble, no checksum). With frames of 9000 bytes
a TCP stream's payload is 8948 of 9014 bytes, 99.3% of the rate, so that asked and delivered can be compared directly;
with frames of 1500 bytes it would be 95.6%.

A plain bucket lets a whole bucketful pass at once after a pause: at 1 Gb/s and 1 ms of credit, 100 KB took 0.1 ms
instead of 0.8. A second, small bucket therefore caps the speed at which credit is spent. What is left: after a pause
the first small bucketful (34 KB at 1 Gb/s, 12 KB at 100 Mb/s) passes at once, and what follows is up to 5% too fast
until 2 ms are gained. 100 KB then take 0.6 ms, 1 MB 7.6 instead of 8.0.
"""

import errno
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, Protocol

from penstock.cluster.topology import Layout
from penstock.errors import ClusterError

MTU = 9000
FRAME_NBYTES = MTU + 14  # with its Ethernet header
NIC = "eth0"
CREDIT_SECONDS = 2e-3  # what a late timer or a busy core cost is made up for, up to this much
PEAK = 1.05  # times the rate, while making up
PEAK_SECONDS = 200e-6  # size of the small bucket beyond one frame; with less, timers are too coarse
LARGEST_PACKET = 65536  # bytes, that the kernel makes
_HEADERS = 1000  # more than the kernel sets aside for headers, less than another frame
QUEUE_NBYTES = 4_000_000  # of a port, as of a switch with deep buffers: at 100 Mb/s, 20 ms of queue cost time-outs


@dataclass(frozen=True, slots=True)
class Bucket:
    """A token bucket, and a second one that caps how fast the first is emptied, as the kernel's `tbf` has them."""

    bits_per_second: int
    credit_nbytes: int  # what the bucket holds: so much may pass faster than the rate after a pause
    queue_nbytes: int  # what waits at most, credit included; more is dropped
    peak_bits_per_second: int | None = None  # of the second bucket; None: there is none
    peak_nbytes: int = 0  # what the second bucket holds


def smooth_bucket(bits_per_second: int) -> Bucket:
    """Return the buckets of a link of this rate."""
    credit = FRAME_NBYTES + round(bits_per_second / 8 * CREDIT_SECONDS)
    small = _small_nbytes(bits_per_second)
    return Bucket(bits_per_second, credit, QUEUE_NBYTES + credit, round(bits_per_second * PEAK), small)


def packet_nbytes(bits_per_second: int) -> int:
    """Return how large a packet TCP may hand to the link: as many whole frames as the small bucket holds.

    The kernel cuts larger ones into single frames before they enter the bucket, each with its own way through the
    switch, which eight busy hosts on two cores cannot afford.
    """
    frames = max(1, _small_nbytes(bits_per_second) // FRAME_NBYTES)
    return min(frames * (MTU - 20 - 32) + _HEADERS, LARGEST_PACKET)


def _small_nbytes(bits_per_second: int) -> int:
    return FRAME_NBYTES + round(bits_per_second / 8 * PEAK_SECONDS)


class _Step:
    """What a step says of itself: what it is for, what a kernel that refuses it lacks, and whether all ends then."""

    __slots__ = ()
    purpose: ClassVar[str]
    remedy: ClassVar[str] = "needs a kernel with CONFIG_VETH; try `modprobe veth`"
    required: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class NewNamespace(_Step):
    """Make a network namespace whose own loopback is up."""

    namespace: str
    purpose: ClassVar[str] = "making a network namespace"
    remedy: ClassVar[str] = "needs a kernel with CONFIG_NET_NS, and a /run that can be written"


@dataclass(frozen=True, slots=True)
class NewBridge(_Step):
    """Make a switch."""

    namespace: str
    bridge: str
    purpose: ClassVar[str] = "making a bridge"
    remedy: ClassVar[str] = "needs a kernel with CONFIG_BRIDGE; try `modprobe bridge`"


@dataclass(frozen=True, slots=True)
class NewCable(_Step):
    """Make a veth pair; its first end hangs on a switch."""

    namespace: str
    interface: str
    bridge: str
    peer_namespace: str
    peer: str
    purpose: ClassVar[str] = "making a veth pair"


@dataclass(frozen=True, slots=True)
class Plug(_Step):
    """Hang an end of a cable on a switch."""

    namespace: str
    interface: str
    bridge: str
    purpose: ClassVar[str] = "joining two switches"


@dataclass(frozen=True, slots=True)
class GiveAddress(_Step):
    """Give a NIC its IPv4 address in a subnet of 256, and switch it on."""

    namespace: str
    interface: str
    address: str
    purpose: ClassVar[str] = "giving a host its address"


@dataclass(frozen=True, slots=True)
class ChooseCongestionControl(_Step):
    """Have a host speak TCP cubic, where the kernel has it: figures must not depend on this machine's default."""

    namespace: str
    interface: str
    address: str
    algorithm: str = "cubic"
    purpose: ClassVar[str] = "choosing TCP cubic"
    required: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class LimitPackets(_Step):
    """Have TCP make packets that fit the bucket whole; without it links hold their rate too, at a higher price."""

    namespace: str
    interface: str
    nbytes: int
    purpose: ClassVar[str] = "limiting the size of packets"
    required: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class LimitRate(_Step):
    """Limit what leaves an interface."""

    namespace: str
    interface: str
    bucket: Bucket
    again: bool = False  # another limit takes the place of this one
    purpose: ClassVar[str] = "limiting a link"
    remedy: ClassVar[str] = (
        "needs a kernel with CONFIG_NET_SCH_TBF; try `modprobe sch_tbf`, or --rate none for links without a limit"
    )


@dataclass(frozen=True, slots=True)
class SwitchLink(_Step):
    """Switch an interface on or off: at a switch's end of a cable, as if that were pulled."""

    namespace: str
    interface: str
    is_up: bool
    purpose: ClassVar[str] = "switching a link on or off"


Step = (
    NewNamespace
    | NewBridge
    | NewCable
    | Plug
    | GiveAddress
    | ChooseCongestionControl
    | LimitPackets
    | LimitRate
    | SwitchLink
)
Buckets = Callable[[int], Bucket]  # from a rate in bits per second


def setup_steps(layout: Layout, bucket: Buckets = smooth_bucket) -> Iterator[Step]:
    """Yield the steps that build `layout`, in order."""
    for namespace in layout.namespaces:
        yield NewNamespace(namespace)
    for rack in range(layout.racks):
        yield NewBridge(layout.switch, f"rack{rack}")
    for host in layout.hosts:
        yield NewCable(layout.switch, host.port, f"rack{host.rack}", host.namespace, NIC)
        yield GiveAddress(host.namespace, NIC, host.address)
        yield ChooseCongestionControl(host.namespace, NIC, host.address)
        if host.bits_per_second is not None:
            yield LimitPackets(host.namespace, NIC, packet_nbytes(host.bits_per_second))
            yield LimitRate(host.namespace, NIC, bucket(host.bits_per_second))
            yield LimitRate(layout.switch, host.port, bucket(host.bits_per_second))
    if layout.racks > 1:
        yield from _uplink_steps(layout, bucket)


def _uplink_steps(layout: Layout, bucket: Buckets) -> Iterator[Step]:
    yield NewBridge(layout.switch, "core")
    for rack in range(layout.racks):
        up, down = f"up{rack}", f"down{rack}"
        yield NewCable(layout.switch, up, f"rack{rack}", layout.switch, down)
        yield Plug(layout.switch, down, "core")
        if layout.uplink_bits_per_second is not None:
            yield LimitRate(layout.switch, up, bucket(layout.uplink_bits_per_second))
            yield LimitRate(layout.switch, down, bucket(layout.uplink_bits_per_second))


# What this machine must have, and errors that name what it lacks


PACKAGES = {"nsenter": "util-linux", "unshare": "util-linux", "mount": "mount"}
FORBIDDEN_REMEDY = "needs CAP_SYS_ADMIN and CAP_NET_ADMIN; in a container, start it with --privileged"
COMMAND_TIMEOUT_SECONDS = 30.0

Runner = Callable[[Sequence[str]], tuple[int, str, str]]  # runs a short command: exit code, its output, its errors


class Kernel(Protocol):
    """Makes and removes what emulated hosts consist of."""

    def build(self, steps: Iterable[Step]) -> None:
        """Carry out `steps` in order; raise `ClusterError` where a required one fails."""
        ...

    def namespaces(self) -> list[str]:
        """Return the names of all network namespaces that have one."""
        ...

    def remove(self, namespace: str) -> None:
        """Remove a namespace, and with it the ends of cables in it; raise `OSError` where that fails."""
        ...


def this_kernel() -> Kernel:
    """Return this machine's kernel."""
    from penstock.cluster.netlink import Netlink  # pyroute2 takes 0.2 s to load, and most of penstock does without

    return Netlink()


def run_command(argv: Sequence[str]) -> tuple[int, str, str]:
    """Run a command in a session of its own, so that Ctrl-C does not stop it half-way."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=COMMAND_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{shlex.join(argv)}` did not end within {COMMAND_TIMEOUT_SECONDS:g} s; try it") from None
    return done.returncode, done.stdout, done.stderr


def require_tools(
    platform: str,
    effective_user: int,
    which: Callable[[str], str | None] = shutil.which,
    find_package: Callable[[str], object | None] = find_spec,
) -> None:
    """Raise `ClusterError` unless this is Linux, we are root and the tools are there."""
    if platform != "linux":
        raise ClusterError(f"emulated hosts are Linux network namespaces and this is {platform}; run on Linux as root")
    if effective_user != 0:
        raise ClusterError("emulated hosts need root to make network namespaces; run the same command with `sudo -E`")
    for tool, package in PACKAGES.items():
        if which(tool) is None:
            raise ClusterError(
                f"emulated hosts need `{tool}`, which is not on PATH; `apt install {package}` or the like"
            )
    if find_package("pyroute2") is None:
        raise ClusterError("emulated hosts need the package pyroute2, which is not installed; `pip install pyroute2`")


def carry_out(steps: Iterable[Step], act: Callable[[Step], None]) -> None:
    """Do every step, or raise with what the kernel said of the one that failed and what kernel or container lack.

    `act` raises `OSError` where a step fails; steps that are not required may.
    """
    for step in steps:
        try:
            act(step)
        except OSError as error:
            if step.required:
                remedy = FORBIDDEN_REMEDY if error.errno in (errno.EPERM, errno.EACCES) else step.remedy
                raise ClusterError(f"{step.purpose} failed: {_words(error)}; {remedy}") from error


def _words(error: OSError) -> str:
    """Return what the kernel said, and its error number in words where that says something else."""
    number = os.strerror(error.errno or 0)
    return number if error.strerror in (None, number) else f"{error.strerror}: {number}"
