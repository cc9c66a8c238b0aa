"""Local aggregation without a number: ranks find out who shares a host, whoever launched them."""

import contextlib
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.codecs.feedback import DeferredResidual
from penstock.codecs.registry import make_codec
from penstock.codecs.sparse.sparse_codec import SparseCodec
from penstock.errors import MismatchError, PenstockError, TransportError
from penstock.runtime import Communicator
from penstock.runtime.handshake import Claim, agree
from penstock.runtime.nodes import exchange_hosts
from penstock.runtime.transport.memory import Fabric, MemoryTransport
from runtime.threads import outcomes, run_ranks

TIMEOUT_SECONDS = 120.0  # nothing takes so long, however busy the machine
HOSTS = st.lists(st.sampled_from("abc"), min_size=1, max_size=7)  # of ranks: uneven and in any order
NUMEL, BOUNDS = 300, (0, 100, 103, 300)


def placed(
    transport: MemoryTransport, hosts: str | list[str], timeout_seconds: float = TIMEOUT_SECONDS
) -> Communicator:
    return Communicator(transport, timeout_seconds=timeout_seconds, host=lambda: hosts[transport.rank])


@cache
def compiled(spec: str) -> Any:
    """Return a codec for all ranks; loading its kernels takes longer than using them here."""
    return make_codec(spec)


def oracle(hosts: list[str]) -> tuple[tuple[int, ...], ...]:
    firsts = sorted({hosts.index(host) for host in hosts})
    return tuple(tuple(rank for rank in range(len(hosts)) if hosts[rank] == hosts[first]) for first in firsts)


def dyadic(*shape: int) -> np.ndarray:
    """Return small multiples of 1/8: their sums are exact in float32, in any order."""
    return (np.random.default_rng(shape).integers(-64, 65, shape) / 8).astype(np.float32)


@given(HOSTS)
@settings(deadline=None, max_examples=25)
def test_all_ranks_find_the_same_nodes(hosts: list[str]) -> None:
    found = run_ranks(len(hosts), lambda one: exchange_hosts(one, hosts[one.rank], TIMEOUT_SECONDS))
    assert found == [oracle(hosts)] * len(hosts)


@given(HOSTS)
@settings(deadline=None, max_examples=15)
def test_without_a_number_the_ranks_of_a_host_sum_first(hosts: list[str]) -> None:
    data = dyadic(len(hosts), NUMEL)

    def rank(transport: MemoryTransport) -> tuple[np.ndarray, object]:
        communicator, values = placed(transport, hosts), data[transport.rank].copy()
        communicator.all_reduce(values, "hierarchical")
        return values, communicator.nodes()

    for values, nodes in run_ranks(len(hosts), rank):
        np.testing.assert_array_equal(values, data.sum(axis=0))
        assert nodes == oracle(hosts)


CODECS = {
    "topk(density=0.25)": ("ring", "parameter_server", "all_gather"),
    "onebit": ("ring",),
    "sparse(density=0.05)": ("gtopk", "gtopk_doubling", "topk_allgather"),
}


@given(HOSTS, st.sampled_from([(codec, outer) for codec, outers in CODECS.items() for outer in outers]))
@settings(deadline=None, max_examples=16)
def test_bits_are_the_same_everywhere_and_what_a_leader_does_not_send_it_keeps(
    hosts: list[str], way: tuple[str, str]
) -> None:
    (codec, outer), steps, world_size = way, 3, len(hosts)
    data = dyadic(steps, world_size, NUMEL)

    def rank(transport: MemoryTransport) -> tuple[np.ndarray, np.ndarray, bool]:
        communicator, encoder = placed(transport, hosts), compiled(codec)
        encodes = communicator.encodes("hierarchical")
        kept = np.zeros(NUMEL, np.float32)
        residual = DeferredResidual(kept) if encoder.capabilities.deferred_feedback else kept
        applied = []
        for step in range(steps):
            values = data[step, transport.rank].copy()
            given_residual = residual if encodes else None
            communicator.all_reduce(values, f"hierarchical(outer={outer})", encoder, given_residual, BOUNDS)
            applied.append(values)
        return np.array(applied), residual.values() if isinstance(residual, DeferredResidual) else kept, encodes

    ranks = run_ranks(world_size, rank)
    for applied, _, _ in ranks[1:]:
        np.testing.assert_array_equal(applied, ranks[0][0])
    assert [encodes for _, _, encodes in ranks] == [hosts.index(host) == at for at, host in enumerate(hosts)]
    total = ranks[0][0].sum(axis=0, dtype=np.float64) + sum(kept.astype(np.float64) for _, kept, _ in ranks)
    wanted = data.sum(axis=(0, 1), dtype=np.float64)
    if codec == "onebit":  # its scale is no dyadic number
        np.testing.assert_allclose(total, wanted, rtol=0, atol=1e-3)
    else:
        np.testing.assert_array_equal(total, wanted)


def test_a_number_that_is_said_counts_more_than_the_hosts() -> None:
    def rank(transport: MemoryTransport) -> tuple[bool, bool]:
        communicator = placed(transport, "aabb")
        return communicator.encodes("hierarchical(ranks_per_node=3)"), communicator.encodes("ring")

    assert run_ranks(4, rank) == [(True, True), (False, True), (False, True), (True, True)]


def test_ranks_that_make_different_calls_are_told_so_while_they_look_for_their_hosts() -> None:
    def rank(transport: MemoryTransport) -> None:
        strategy = "ring" if transport.rank == 1 else "hierarchical"
        placed(transport, "aab").all_reduce(np.ones(8, np.float32), strategy)

    for error in outcomes(3, rank):
        assert isinstance(error, MismatchError)
        assert "strategy is 'ring' on rank 1 and 'hierarchical' on rank 0; all ranks must make the same" in str(error)


def test_what_no_program_can_do_with_the_hosts_is_one_error_on_every_rank() -> None:
    def rank(transport: MemoryTransport) -> None:
        strategy = "hierarchical(outer=parameter_server, servers=3)"
        placed(transport, "abab").all_reduce(np.ones(8, np.float32), strategy, SparseCodec(0.5))

    for error in outcomes(4, rank):
        assert str(error).endswith(
            "hierarchical: 3 servers between 2 nodes ((0, 2), (1, 3)); wanted at most one for each node"
        )


@pytest.mark.parametrize("joins", [False, True])  # dead before programs are compared, and after that
def test_a_rank_that_is_gone_is_named_and_the_communicator_says_so_afterwards(joins: bool) -> None:
    fabric = Fabric(3)

    def rank(transport: MemoryTransport) -> str:
        communicator = placed(transport, "aab", timeout_seconds=5.0)  # of which a tenth is for asking around
        if transport.rank == 2:
            if joins:
                claim = Claim("", "all_reduce", "hierarchical", transport.world_size)
                with contextlib.suppress(TransportError):  # where others were too busy, they fail just the same
                    agree(transport, claim, TIMEOUT_SECONDS)
            fabric.kill(2)
            return ""
        with pytest.raises(TransportError) as caught:
            communicator.all_reduce(np.ones(8, np.float32), "hierarchical")
        with pytest.raises(PenstockError, match="this communicator failed before"):
            communicator.all_reduce(np.ones(8, np.float32), "ring")
        return str(caught.value)

    for message in run_ranks(3, rank, fabric)[:2]:
        assert message.startswith("hierarchical: rank ")
