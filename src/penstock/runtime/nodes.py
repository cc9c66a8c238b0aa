"""Finds the ranks of each host by asking: every rank says where it is, rank 0 compares and tells all.

Local aggregation sums dense among the ranks of a host and compresses between hosts (`strategies/hierarchical.py`). How
many ranks a host has, and which, need not be said: launchers number ranks host by host (torchrun) or deal them out
(`mpirun --map-by node`), and hosts may have different numbers of them.

    rank             0  1  2  3  4
    says             A  B  A  B  A         32 bytes to rank 0: a digest of what it shares with its neighbours
    rank 0 answers   0  1  0  1  0         4 bytes per rank to all: the first rank of each one's host
    nodes            (0, 2, 4)  (1, 3)
"""

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np

from penstock.errors import TransportError
from penstock.runtime.failure_diagnosis import Note, asking_seconds, explained
from penstock.runtime.handshake import Claim, agree
from penstock.runtime.hosts import Nodes, group_by_host
from penstock.runtime.transport import CHECK_TAG, Bytes, Transport
from penstock.strategies.hierarchical import NAME as HIERARCHICAL


def find_nodes(transport: Transport, host: str, timeout_seconds: float, call: int) -> Nodes:
    """Return the ranks of each host, once all ranks are known to ask for them, in their call number `call`.

    Raises `MismatchError` where another rank is about to run something else, `TransportError` where one stays away.
    """
    where, seconds = Note(call, f"all_reduce by {HIERARCHICAL}"), timeout_seconds - asking_seconds(timeout_seconds)
    claim = Claim(collective="all_reduce", strategy=HIERARCHICAL, world_size=transport.world_size, host=host)
    try:
        agree(transport, claim, seconds)
        return exchange_hosts(transport, host, seconds)
    except (TimeoutError, ConnectionError) as cause:
        error = TransportError(HIERARCHICAL, transport.rank, "0, asking where ranks are", None, str(cause))
        raise explained(error, transport, where, timeout_seconds) from cause
    except TransportError as error:
        raise explained(error, transport, where, timeout_seconds) from error.__cause__


def exchange_hosts(transport: Transport, host: str, timeout_seconds: float) -> Nodes:
    """Return the ranks of each host; every rank must call this at the same time, with the host that it is on.

    Raises `TimeoutError` or `ConnectionError` where a rank does not come.
    """
    mine = np.frombuffer(hashlib.sha256(host.encode()).digest(), np.uint8).copy()
    found = np.zeros(transport.world_size, np.uint32)
    if transport.rank == 0:
        found[:] = _first_ranks(_collected(transport, mine, timeout_seconds))
        for work in [transport.isend(_bytes(found), peer, CHECK_TAG) for peer in range(1, transport.world_size)]:
            work.wait(timeout_seconds)
    else:
        sending = transport.isend(mine, 0, CHECK_TAG)
        receiving = transport.irecv(_bytes(found), 0, CHECK_TAG)
        sending.wait(timeout_seconds)
        receiving.wait(timeout_seconds)
    return group_by_host(found.tolist())


def _collected(transport: Transport, mine: Bytes, timeout_seconds: float) -> list[bytes]:
    digests = [mine, *(np.zeros_like(mine) for _ in range(1, transport.world_size))]
    for work in [transport.irecv(each, peer, CHECK_TAG) for peer, each in enumerate(digests) if peer]:
        work.wait(timeout_seconds)
    return [each.tobytes() for each in digests]


def _first_ranks(hosts: Sequence[Hashable]) -> list[int]:
    return [hosts.index(host) for host in hosts]


def _bytes(numbers: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> Bytes:
    return numbers.view(np.uint8)
