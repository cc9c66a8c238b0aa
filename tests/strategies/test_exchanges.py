"""Recursive doubling, halving and doubling, bidirectional exchange, and the folding that two of them need."""

from math import ceil, log2

import pytest

from penstock.strategies import Options, build
from penstock.verify import require_proof
from penstock.verify.summary import Summary, summarise

POWERS = [2, 4, 8, 16, 32]


def summary_of(operation: str, name: str, world_size: int, numel: int, root: int = 0) -> Summary:
    program = build(operation, name, world_size, numel, Options(root=root))
    return summarise(program, require_proof(program).steps)


@pytest.mark.parametrize("world_size", POWERS)
def test_recursive_doubling_takes_log2_steps_of_all_the_data(world_size):
    summary = summary_of("all_reduce", "recursive_doubling", world_size, 64)
    assert summary.steps == summary.least_steps == log2(world_size)
    assert summary.bytes_per_nic == log2(world_size) * 64 * 4


@pytest.mark.parametrize("world_size", POWERS)
@pytest.mark.parametrize("name", ["halving_doubling", "bidirectional_exchange"])
def test_halving_takes_twice_log2_steps_and_the_least_bytes(name, world_size):
    summary = summary_of("all_reduce", name, world_size, 64)
    assert summary.steps == 2 * log2(world_size)
    assert summary.byte_ratio == 1.0


@pytest.mark.parametrize("world_size", [3, 5, 6, 7, 12, 17, 33])
def test_folding_adds_two_steps_and_the_data_twice(world_size):
    power = 2 ** int(log2(world_size))
    for name, per_level in (("recursive_doubling", 1), ("halving_doubling", 2)):
        summary = summary_of("all_reduce", name, world_size, 64)
        assert summary.steps == per_level * log2(power) + 2
        assert summary.link_nbytes[power, 0] == summary.link_nbytes[0, power] == 64 * 4


@pytest.mark.parametrize("world_size", [3, 5, 6, 7, 12, 17, 33])
def test_bidirectional_exchange_needs_no_folding_and_fewer_bytes(world_size):
    summary = summary_of("all_reduce", "bidirectional_exchange", world_size, 32 * world_size)
    folded = summary_of("all_reduce", "halving_doubling", world_size, 32 * world_size)
    assert summary.bytes_per_nic < folded.bytes_per_nic
    assert summary.steps <= 2.2 * ceil(log2(world_size)) + 4


@pytest.mark.parametrize("world_size", POWERS)
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_half_an_exchange_is_optimal_in_steps_and_bytes(operation, world_size):
    summary = summary_of(operation, "bidirectional_exchange", world_size, 64)
    assert (summary.step_ratio, summary.byte_ratio) == (1.0, 1.0)


@pytest.mark.parametrize("world_size", POWERS)
@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
def test_scatter_and_gather_cost_log2_steps_more(operation, world_size):
    summary = summary_of(operation, "bidirectional_exchange", world_size, 64, root=world_size - 1)
    assert summary.steps == 2 * log2(world_size)
    assert summary.bytes_per_nic == 2 * 64 * 4 * (world_size - 1) // world_size


def test_the_example_of_the_bidirectional_page_comes_true():
    proof = require_proof(build("reduce_scatter", "bidirectional_exchange", 3, 3))
    found = {(one.step, one.source, one.target): one.elements for one in proof.carried}
    assert found == {(1, 0, 2): (2, 3), (1, 2, 0): (0, 2), (2, 1, 2): (2, 3), (2, 0, 1): (1, 2), (3, 1, 0): (0, 1)}


def test_the_example_of_the_recursive_doubling_page_comes_true():
    proof = require_proof(build("all_reduce", "recursive_doubling", 4, 1))
    found = {(one.step, one.source, one.target): one.contributors for one in proof.carried}
    first = {(1, 0, 1): 1, (1, 1, 0): 2, (1, 2, 3): 4, (1, 3, 2): 8}
    assert found == first | {(2, 0, 2): 3, (2, 1, 3): 3, (2, 2, 0): 12, (2, 3, 1): 12}
