"""From a layout to the `ip` and `tc` commands that build it, as data.

Every cable is a veth pair with a token bucket (`tbf`) at both ends, because a bucket limits what leaves an interface:
the host's end limits what the host sends, the switch's end what it receives.

A rate counts Ethernet frames as the kernel does (14-byte header, no preamble, no checksum). With frames of 9000 bytes
a TCP stream's payload is 8948 of 9014 bytes, 99.3% of the rate, so that asked and delivered can be compared directly;
with frames of 1500 bytes it would be 95.6%.

A plain bucket lets a whole bucketful pass at once after a pause: at 1 Gb/s and 1 ms of credit, 100 KB took 0.1 ms
instead of 0.8. A second, small bucket (`peakrate`) therefore caps the speed at which credit is spent. What is left:
after a pause the first small bucketful (34 KB at 1 Gb/s, 12 KB at 100 Mb/s) passes at once, and what follows is up
to 5% too fast until 2 ms are gained. 100 KB then take 0.6 ms, 1 MB 7.6 instead of 8.0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.cluster.layout import Host, Layout

MTU = 9000
FRAME_NBYTES = MTU + 14  # with its Ethernet header
PAYLOAD_FRACTION = (MTU - 20 - 32) / FRAME_NBYTES  # IPv4 header; TCP header with time stamps; Ethernet header
NIC = "eth0"
CREDIT_SECONDS = 2e-3  # what a late timer or a busy core cost is made up for, up to this much
PEAK = 1.05  # times the rate, while making up
PEAK_SECONDS = 200e-6  # size of the small bucket beyond one frame; with less, timers are too coarse
LARGEST_PACKET = 65536  # bytes, that the kernel makes
_HEADERS = 1000  # more than the kernel sets aside for headers, less than another frame
QUEUE_NBYTES = 4_000_000  # of a port, as of a switch with deep buffers: at 100 Mb/s, 20 ms of queue cost time-outs


@dataclass(frozen=True, slots=True)
class Step:
    """One command, what it is for, and what to do where it fails."""

    argv: tuple[str, ...]
    stdin: str  # lines for `ip -batch -`; empty where the command needs none
    purpose: str
    remedy: str
    required: bool = True


NAMESPACE_REMEDY = "needs a kernel with CONFIG_NET_NS, and a /run that can be written"
BRIDGE_REMEDY = "needs a kernel with CONFIG_BRIDGE; try `modprobe bridge`"
VETH_REMEDY = "needs a kernel with CONFIG_VETH; try `modprobe veth`"
BUCKET_REMEDY = (
    "needs a kernel with CONFIG_NET_SCH_TBF; try `modprobe sch_tbf`, or --rate none for links without a limit"
)


def setup_steps(layout: Layout) -> Iterator[Step]:
    """Yield the commands that build `layout`, in order."""
    for namespace in layout.namespaces:
        yield Step(("ip", "netns", "add", namespace), "", "making a network namespace", NAMESPACE_REMEDY)
    yield _ip(layout.switch, _switch_lines(layout), "making a bridge", BRIDGE_REMEDY)
    for host in layout.hosts:
        yield _ip(layout.switch, _cable_lines(host), "making a veth pair", VETH_REMEDY)
        yield _ip(host.namespace, _host_lines(host), "giving a host its address", VETH_REMEDY)
        yield _congestion_control(host)
        if host.bits_per_second is not None:
            yield _packet_limit(host, packet_nbytes(host.bits_per_second))
            yield _bucket(host.namespace, NIC, host.bits_per_second)
            yield _bucket(layout.switch, host.port, host.bits_per_second)
    if layout.racks > 1:
        yield from _uplink_steps(layout)


def packet_nbytes(bits_per_second: int) -> int:
    """Return how large a packet TCP may hand to the link: as many whole frames as the small bucket holds.

    The kernel cuts larger ones into single frames before they enter the bucket, each with its own way through the
    switch, which eight busy hosts on two cores cannot afford.
    """
    frames = max(1, _small_nbytes(bits_per_second) // FRAME_NBYTES)
    return min(frames * (MTU - 20 - 32) + _HEADERS, LARGEST_PACKET)


def _small_nbytes(bits_per_second: int) -> int:
    return FRAME_NBYTES + round(bits_per_second / 8 * PEAK_SECONDS)


def bucket_arguments(bits_per_second: int) -> list[str]:
    """Return `tbf`'s arguments for a link of this rate."""
    bytes_per_second = bits_per_second / 8
    credit = FRAME_NBYTES + round(bytes_per_second * CREDIT_SECONDS)
    small = _small_nbytes(bits_per_second)
    arguments = ["rate", f"{bits_per_second}bit", "burst", str(credit), "limit", str(QUEUE_NBYTES + credit)]
    return [*arguments, "peakrate", f"{round(bits_per_second * PEAK)}bit", "mtu", str(small)]


def _switch_lines(layout: Layout) -> list[str]:
    bridges = [f"rack{rack}" for rack in range(layout.racks)] + (["core"] if layout.racks > 1 else [])
    return ["link set lo up"] + [
        line for bridge in bridges for line in (f"link add {bridge} type bridge", f"link set {bridge} mtu {MTU} up")
    ]


def _cable_lines(host: Host) -> list[str]:
    return [
        f"link add {host.port} mtu {MTU} type veth peer name {NIC} mtu {MTU} netns {host.namespace}",
        f"link set {host.port} master rack{host.rack} up",
    ]


def _host_lines(host: Host) -> list[str]:
    return ["link set lo up", f"addr add {host.address}/24 dev {NIC}", f"link set {NIC} up"]


def _packet_limit(host: Host, nbytes: int) -> Step:
    """Have TCP make packets that fit the bucket whole; without it links hold their rate too, at a higher price."""
    argv = ("ip", "-n", host.namespace, "link", "set", "dev", NIC, "gso_max_size", str(nbytes))
    return Step(argv, "", "limiting the size of packets", "", required=False)


def _congestion_control(host: Host) -> Step:
    """Have every host speak TCP cubic, where the kernel has it: figures must not depend on this machine's default."""
    route = f"{host.address.rpartition('.')[0]}.0/24"
    argv = ("ip", "-n", host.namespace, "route", "replace", route, "dev", NIC, "src", host.address, "congctl", "cubic")
    return Step(argv, "", "choosing TCP cubic", "", required=False)


def _uplink_steps(layout: Layout) -> Iterator[Step]:
    for rack in range(layout.racks):
        lines = [
            f"link add up{rack} mtu {MTU} type veth peer name down{rack} mtu {MTU}",
            f"link set up{rack} master rack{rack} up",
            f"link set down{rack} master core up",
        ]
        yield _ip(layout.switch, lines, "making a veth pair", VETH_REMEDY)
        if layout.uplink_bits_per_second is not None:
            yield _bucket(layout.switch, f"up{rack}", layout.uplink_bits_per_second)
            yield _bucket(layout.switch, f"down{rack}", layout.uplink_bits_per_second)


def _ip(namespace: str, lines: list[str], purpose: str, remedy: str) -> Step:
    return Step(("ip", "-n", namespace, "-batch", "-"), "\n".join(lines) + "\n", purpose, remedy)


def _bucket(namespace: str, interface: str, bits_per_second: int) -> Step:
    argv = ["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *bucket_arguments(bits_per_second)]
    return Step(tuple(argv), "", "limiting a link", BUCKET_REMEDY)
