"""Will it pay? Yes, no, and by merging alone, where a hand calculation says so."""

from dataclasses import replace

import pytest

from penstock.errors import PlanError
from penstock.planning.worth import ASSUMED_GPU_CURVES, described_network, described_routes, worth
from penstock.trace import Tensor, Trace


def trace_of(tensors: int, numel: int, backward_seconds: float) -> Trace:
    parts = tuple(Tensor(f"layer{place}", numel, backward_seconds / tensors) for place in range(tensors))
    return Trace("toy", "NVIDIA H200", 8, "float32", 0.01, parts)


def asked(trace: Trace, gigabits: float, workers: int = 4, optimizer: str = "adamw"):
    network = replace(described_network(workers, gigabits * 1e9, 50e-6), codecs=dict(ASSUMED_GPU_CURVES))
    return worth(trace, network, described_routes(), optimizer)


def test_a_slow_network_is_worth_four_bits_and_says_what_to_write():
    found = asked(trace_of(10, 10_000_000, 0.02), 1)  # 400 MB at 1 Gb/s: 2 * 3/4 * 400e6 * 8e-9 = 4.8 s
    assert found.stock_seconds == pytest.approx(4.8, rel=0.02)
    assert found.codec == "blocks(bits=4)"
    assert 5 < found.gain < 8  # an eighth of the bytes at best
    assert found.code == 'DDP(model, codec="blocks(bits=4)")'
    assert len(lines := list(found.lines())) == 5
    assert lines[3].startswith("answer           yes")


def test_a_network_that_computation_hides_is_a_no():
    found = asked(trace_of(10, 1000, 0.02), 100)
    assert found.code == ""
    assert "no: computation hides the network already" in list(found.lines())[3]


def test_what_waits_is_what_computation_does_not_hide():
    found = asked(trace_of(10, 10_000_000, 0.02), 1)
    assert found.waiting_seconds == pytest.approx(found.stock_seconds - 0.03)


def test_the_picture_shows_stock_above_what_is_advised():
    picture = asked(trace_of(4, 10_000_000, 0.02), 1).picture()
    assert [line.split(" |")[0].strip() for line in picture] == [
        "stock compute", "stock network", "advised compute", "advised network"
    ]  # fmt: skip


def test_an_unknown_optimizer_is_refused_with_the_nearest_name():
    with pytest.raises(PlanError, match=r"found 'sgdd'; wanted one of adamw, adam, sgd, other \(did you mean 'sgd'"):
        asked(trace_of(2, 10, 0.01), 1, optimizer="sgdd")
