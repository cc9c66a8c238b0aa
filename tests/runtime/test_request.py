"""Block sizes where nobody chose one: by the cost model between hosts, large where the processor is the link."""

import os
from dataclasses import replace

import numpy as np
import pytest

from penstock.network import Network
from penstock.plan import Bucket, Plan
from penstock.program import Collective
from penstock.runtime import Communicator, handshake
from penstock.runtime.handshake import Claim, shared_cores
from penstock.runtime.request import (
    CROWDED_NBYTES,
    plan_composition,
    with_block,
)
from penstock.runtime.transport.memory import MemoryTransport
from penstock.runtime.views import Flat
from penstock.verify import verify
from runtime.threads import run_ranks

TARGET = Flat(0, 4_000_000, "float32")
NETWORK = Network(workers=4, alpha_seconds=1e-4, beta_seconds_per_byte=1e-9, gamma_seconds_per_byte=0.0)


def chosen(strategy: str, network: Network | None, cores: int, **options: int) -> int | None:
    found = with_block(options, Collective.BROADCAST, strategy, TARGET, 4, network, cores)
    return found.get("block_numel")


def test_between_hosts_the_strategy_or_the_measured_network_decides() -> None:
    assert chosen("ring", None, 0) is None
    assert chosen("ring", NETWORK, 0) is None
    assert chosen("linear_pipeline", None, 0) is None
    assert chosen("linear_pipeline", NETWORK, 0) == pytest.approx((16e6 * 1e-4 / (3 * 1e-9)) ** 0.5 / 4, abs=1)


def test_a_startup_too_short_to_be_measured_leaves_the_block_to_the_strategy() -> None:
    assert chosen("linear_pipeline", replace(NETWORK, alpha_seconds=0.0), 0) is None


@pytest.mark.parametrize("strategy", ["ring", "linear_pipeline"])
def test_ranks_that_outnumber_half_the_cores_of_one_host_cut_coarsely(strategy: str) -> None:
    assert chosen(strategy, NETWORK, 2) == chosen(strategy, None, 7) == CROWDED_NBYTES // 4
    assert chosen(strategy, None, 8) is None


def test_what_the_caller_says_is_kept() -> None:
    assert chosen("ring", NETWORK, 1, block_numel=5) == 5


def test_ranks_share_cores_only_if_all_are_on_one_host() -> None:
    here = Claim(host="a", cores=8)
    assert shared_cores([here, Claim(host="a", cores=6)]) == 6
    assert shared_cores([here, here, Claim(host="b", cores=8)]) == 0
    assert handshake.difference([here, Claim(host="b", cores=2)]) == ""


@pytest.mark.parametrize(("cores", "messages"), [(2, 6), (64, 2 * 3 * 8)])
def test_the_first_program_is_cut_for_the_host_all_ranks_found_themselves_on(
    cores: int, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(cores)))

    def rank(transport: MemoryTransport) -> tuple[int, float]:
        communicator, values = Communicator(transport, timeout_seconds=120), np.ones(4 * (1 << 20), np.float32)
        communicator.all_reduce(values)
        (prepared,) = communicator._prepared.values()
        return sum(one.op.value == "send" for one in prepared.part.instructions), float(values[0])

    assert run_ranks(4, rank) == [(messages, 4.0)] * 4


def test_a_plan_as_it_is_queued_on_a_device_is_proved() -> None:
    sizes = {"a": 3_000_000, "b": 2_000_000, "c": 4000, "d": 3_000_000, "e": 2_000_000}
    names, served = (("c",), ("a", "b"), ("d", "e")), ("parameter_server", "blocks(bits=4)")
    routes = ("native", None), served, served
    buckets = [
        Bucket(each, 4 * sum(map(sizes.__getitem__, each)), *route) for each, route in zip(names, routes, strict=True)
    ]
    composition = plan_composition(Plan("toy", 3, "any", tuple(buckets)), sizes, queued=True)
    assert len(composition.programs) == 3
    assert set(composition.lane_of) == {0}
    assert verify(composition).proved
