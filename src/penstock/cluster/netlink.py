"""Namespaces, cables, addresses and token buckets of this machine, over netlink: neither `ip` nor `tc` is needed.

A thread enters the namespaces, not the process: a namespace is entered by one thread at a time, and a socket made
there stays there. Nothing is forked, and the caller's own threads and event loops notice nothing.
"""

import ctypes
import fcntl
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from pyroute2 import IPRoute, netns
from pyroute2.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import RTM_NEWQDISC, TC_H_ROOT
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from penstock.cluster.building import (
    MTU,
    Bucket,
    ChooseCongestionControl,
    GiveAddress,
    LimitPackets,
    LimitRate,
    NewBridge,
    NewCable,
    NewNamespace,
    Plug,
    Step,
    SwitchLink,
    carry_out,
)
from penstock.cluster.topology import NAMESPACE_DIRECTORY, namespace_path

CLONE_NEWNET = 0x40000000
LOOPBACK = 1  # index of `lo` in every namespace
_CREATE = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL
_REPLACE = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE
_ETHERNET = 1  # TC_LINKLAYER_ETHERNET: frames count as they are, and the kernel asks for no table of their costs
_PARMS, _RATE64, _PEAK_RATE64, _BURST, _PEAK_BURST = 1, 4, 5, 6, 7  # TCA_TBF_...
_LARGEST_RATE = 2**32 - 1  # bytes per second that the field of the first interface holds
_OPEN_SOCKETS = 2  # the switch's and a host's; 250 hosts would take more descriptors than a process has


class Netlink:
    """The kernel of this machine."""

    def build(self, steps: Iterable[Step]) -> None:
        """Carry out `steps` in order; raise `ClusterError` where a required one fails."""
        with ThreadPoolExecutor(1, "netlink") as thread:
            thread.submit(_build, steps).result()

    def namespaces(self) -> list[str]:
        """Return the names of all network namespaces that have one."""
        return sorted(netns.listnetns(str(NAMESPACE_DIRECTORY)))

    def remove(self, namespace: str) -> None:
        """Remove a namespace; its interfaces go with the last process inside."""
        netns.remove(str(namespace_path(namespace)))


def _build(steps: Iterable[Step]) -> None:
    with _Rooms() as rooms:
        carry_out(steps, rooms.act)


class _Rooms:
    """Sockets into the namespaces that were used last, for the one thread that uses them."""

    def __init__(self) -> None:
        self._sockets: OrderedDict[str, Any] = OrderedDict()  # namespace -> its IPRoute, last used last
        self._indices: dict[tuple[str, str], int] = {}  # namespace and interface -> number

    def __enter__(self) -> "_Rooms":
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for socket in self._sockets.values():
                stack.callback(socket.close)

    def act(self, step: Step) -> None:
        """Carry out one step; raise `OSError` with the kernel's words where it refuses."""
        try:
            _ACTIONS[type(step)](self, step)
        except NetlinkError as error:
            raise OSError(error.code, str(error.args[1]).strip(". ")) from error

    def inside(self, namespace: str) -> Any:
        """Return a socket in a namespace."""
        if namespace not in self._sockets:
            if len(self._sockets) == _OPEN_SOCKETS:
                self._sockets.popitem(last=False)[1].close()
            netns.setns(str(namespace_path(namespace)), flags=0)
            self._sockets[namespace] = IPRoute(ext_ack=True, groups=0)
        self._sockets.move_to_end(namespace)
        return self._sockets[namespace]

    def index(self, namespace: str, interface: str) -> int:
        """Return the number of an interface."""
        if (namespace, interface) not in self._indices:
            (found,) = self.inside(namespace).link_lookup(ifname=interface)
            self._indices[namespace, interface] = found
        return self._indices[namespace, interface]

    def set_link(self, namespace: str, interface: str, **settings: object) -> None:
        """Change an interface."""
        self.inside(namespace).link("set", index=self.index(namespace, interface), **settings)


def _new_namespace(rooms: _Rooms, step: NewNamespace) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:  # of this thread alone
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with _only_one_at_a_time():
        netns.attach(str(namespace_path(step.namespace)), threading.get_native_id())
    rooms.inside(step.namespace).link("set", index=LOOPBACK, state="up")


@contextmanager
def _only_one_at_a_time() -> Iterator[None]:
    """Hold iproute2's lock: two that mount the directory at once would hide one another's namespaces."""
    NAMESPACE_DIRECTORY.mkdir(exist_ok=True)
    directory = os.open(NAMESPACE_DIRECTORY, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _new_bridge(rooms: _Rooms, step: NewBridge) -> None:
    rooms.inside(step.namespace).link("add", ifname=step.bridge, kind="bridge")
    rooms.set_link(step.namespace, step.bridge, mtu=MTU, state="up")


def _new_cable(rooms: _Rooms, step: NewCable) -> None:
    target = os.open(namespace_path(step.peer_namespace), os.O_RDONLY | os.O_CLOEXEC)
    try:
        peer = {"ifname": step.peer, "mtu": MTU, "net_ns_fd": target}
        rooms.inside(step.namespace).link("add", ifname=step.interface, mtu=MTU, kind="veth", peer=peer)
    finally:
        os.close(target)
    _plug(rooms, step)


def _plug(rooms: _Rooms, step: NewCable | Plug) -> None:
    bridge = rooms.index(step.namespace, step.bridge)
    rooms.set_link(step.namespace, step.interface, master=bridge, state="up")


def _give_address(rooms: _Rooms, step: GiveAddress) -> None:
    index = rooms.index(step.namespace, step.interface)
    rooms.inside(step.namespace).addr("add", index=index, address=step.address, prefixlen=24)
    rooms.set_link(step.namespace, step.interface, state="up")


def _choose_congestion_control(rooms: _Rooms, step: ChooseCongestionControl) -> None:
    subnet = f"{step.address.rpartition('.')[0]}.0/24"
    rooms.inside(step.namespace).route(
        "replace",
        dst=subnet,
        oif=rooms.index(step.namespace, step.interface),
        prefsrc=step.address,
        scope="link",
        metrics={"cc_algo": step.algorithm},
    )


def _limit_packets(rooms: _Rooms, step: LimitPackets) -> None:
    rooms.set_link(step.namespace, step.interface, gso_max_size=step.nbytes)


def _limit_rate(rooms: _Rooms, step: LimitRate) -> None:
    message = _Qdisc()
    message["index"] = rooms.index(step.namespace, step.interface)
    message["parent"] = TC_H_ROOT
    message["attrs"] = [("TCA_KIND", "tbf"), ("TCA_OPTIONS", bucket_options(step.bucket))]
    message["header"]["type"], message["header"]["flags"] = RTM_NEWQDISC, _REPLACE if step.again else _CREATE
    rooms.inside(step.namespace).nlm_request_batch([message])


def _switch_link(rooms: _Rooms, step: SwitchLink) -> None:
    rooms.set_link(step.namespace, step.interface, state="up" if step.is_up else "down")


class _Qdisc(tcmsg):  # type: ignore[misc]  # pyroute2 has no types
    """A queue whose options are bytes: pyroute2's own `tbf` knows neither a second bucket nor rates of 34 Gb/s."""

    nla_map = (("TCA_UNSPEC", "none"), ("TCA_KIND", "asciiz"), ("TCA_OPTIONS", "cdata"))


def bucket_options(bucket: Bucket) -> bytes:
    """Return a bucket as the kernel reads it: `struct tc_tbf_qopt`, and what that has no room for as attributes."""
    rate, peak = bucket.bits_per_second // 8, (bucket.peak_bits_per_second or 0) // 8
    parameters = struct.pack(
        "=BBHhHIBBHhHIIII", *_rate_fields(rate), *_rate_fields(peak), bucket.queue_nbytes, 0, 0
    )  # the zeros: bucket sizes in time, which the attributes below give in bytes
    options = _attribute(_PARMS, parameters) + _attribute(_BURST, struct.pack("=I", bucket.credit_nbytes))
    if rate > _LARGEST_RATE:
        options += _attribute(_RATE64, struct.pack("=Q", rate))
    if peak:
        options += _attribute(_PEAK_BURST, struct.pack("=I", bucket.peak_nbytes))
    if peak > _LARGEST_RATE:
        options += _attribute(_PEAK_RATE64, struct.pack("=Q", peak))
    return options


def _rate_fields(nbytes_per_second: int) -> tuple[int, ...]:
    """Return `struct tc_ratespec`: cell size, link layer, overhead, alignment, least packet, rate."""
    return (0, _ETHERNET, 0, 0, 0, min(nbytes_per_second, _LARGEST_RATE))


def _attribute(kind: int, payload: bytes) -> bytes:
    """Return a netlink attribute; all of ours are multiples of four bytes long."""
    return struct.pack("=HH", 4 + len(payload), kind) + payload


_ACTIONS: dict[type, Callable[[_Rooms, Any], None]] = {
    NewNamespace: _new_namespace,
    NewBridge: _new_bridge,
    NewCable: _new_cable,
    Plug: _plug,
    GiveAddress: _give_address,
    ChooseCongestionControl: _choose_congestion_control,
    LimitPackets: _limit_packets,
    LimitRate: _limit_rate,
    SwitchLink: _switch_link,
}
