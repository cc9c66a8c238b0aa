from dataclasses import replace
from itertools import product

import pytest

from penstock.errors import StrategyError
from penstock.network import Network
from penstock.simulator.program import program_seconds
from penstock.strategies import Options, build, build_compressed, parameter_server, parse_strategy
from penstock.verify import require_proof, verify
from penstock.verify.summary import summarise


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 16, 33])
def test_co_located_servers_take_two_n_minus_one_steps_and_the_least_bytes(world_size):
    program = build("all_reduce", "parameter_server", world_size, 4 * world_size)
    summary = summarise(program, require_proof(program).steps)
    assert (summary.steps, summary.byte_ratio) == (2 * (world_size - 1), 1.0)
    assert summary.messages == 2 * world_size * (world_size - 1)


def test_the_example_of_the_page_comes_true():
    proof = require_proof(build("all_reduce", "parameter_server", 3, 3))
    found: dict[int, set[str]] = {}
    for one in proof.carried:
        name = "abc"[one.elements[0]]
        name = name.upper() if one.contributors == 7 else name
        found.setdefault(one.step, set()).add(f"{one.source}{one.target}{name}")
    assert found == {
        1: {"01b", "12c", "20a"}, 2: {"02c", "10a", "21b"}, 3: {"01A", "12B", "20C"}, 4: {"02A", "10B", "21C"},
    }  # fmt: skip


def test_one_partition_puts_all_the_work_on_one_rank():
    program = build("all_reduce", "parameter_server", 5, 20, Options(partitions=1))
    summary = summarise(program, require_proof(program).steps)
    assert summary.bytes_per_nic == 4 * 20 * 4
    assert {one.target for one in require_proof(program).carried if one.source != 0} == {0}


def test_dedicated_servers_are_the_last_ranks():
    program = build("all_reduce", "parameter_server", 6, 24, Options(servers=2))
    proof = require_proof(program)
    assert {one.source for one in proof.carried if one.contributors == 63} == {4, 5}
    assert {one.target for one in proof.carried if one.contributors != 63} == {4, 5}


@pytest.mark.parametrize(("partitions", "servers"), list(product((None, 1, 3, 8, 40), (None, 1, 2, 5))))
def test_any_number_of_partitions_and_servers_is_proved(partitions, servers):
    for world_size in (5, 6, 11):
        for numel in (0, 1, 7, 50):
            options = Options(partitions=partitions, servers=servers)
            assert require_proof(build("all_reduce", "parameter_server", world_size, numel, options)).proved


def test_more_servers_than_ranks_are_refused():
    with pytest.raises(StrategyError, match="parameter_server: 5 servers of 4 ranks; wanted at most 4"):
        build("all_reduce", "parameter_server", 4, 8, Options(servers=5))


def dedicated(servers, partitions=None):
    return Options(servers=servers, dedicated=True, partitions=partitions)


def test_the_example_of_dedicated_servers_comes_true():
    proof = require_proof(build("all_reduce", "parameter_server", 4, 2, dedicated(2)))
    found: dict[int, set[str]] = {}
    for one in proof.carried:
        name = "ab"[one.elements[0]]
        found.setdefault(one.step, set()).add(f"{one.source}{one.target}{name.upper() if one.source > 1 else name}")
    assert found == {1: {"02a", "13b"}, 2: {"03b", "12a"}, 3: {"20A", "31B"}, 4: {"21A", "30B"}}


@pytest.mark.parametrize(("partitions", "servers"), list(product((None, 1, 3, 8), (1, 2, 3))))
def test_dedicated_servers_are_proved_dense_and_coded_and_send_nothing_to_one_another(partitions, servers):
    for world_size in (4, 6, 11):
        for numel in (0, 1, 7, 50):
            options = dedicated(servers, partitions)
            proof = require_proof(build("all_reduce", "parameter_server", world_size, numel, options))
            assert require_proof(build_compressed("parameter_server", world_size, (0, numel), options)[0]).proved
            first = world_size - servers
            assert all((one.source < first) != (one.target < first) for one in proof.carried)


def test_a_proof_with_dedicated_servers_still_finds_a_worker_that_is_missing():
    program = build("all_reduce", "parameter_server", 4, 8, dedicated(2))
    assert verify(program).proved
    assert verify(replace(program, servers=1)).findings  # rank 2 then is a worker whose data no server has for b


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 2), (6, 3), (5, 2)])
def test_dedicated_servers_take_what_their_closed_form_says(workers, servers):
    network, numel = Network(1, 1e-4, 1e-8, 0.0), 1200 * servers
    program = build("all_reduce", "parameter_server", workers + servers, numel, dedicated(servers))
    push, pull = parameter_server.stages(network, workers + servers, dedicated(servers)).values()
    assert program_seconds(program, network) == pytest.approx((push + pull).seconds(4 * numel))


def test_dedicated_servers_are_written_behind_the_name():
    assert parse_strategy("parameter_server(servers=2, dedicated=True)") == (
        "parameter_server", {"servers": 2, "dedicated": True},
    )  # fmt: skip
    with pytest.raises(StrategyError, match="dedicated is 'maybe'; wanted true or false"):
        parse_strategy("parameter_server(servers=2, dedicated=maybe)")
    with pytest.raises(StrategyError, match="dedicated without servers; wanted how many"):
        parse_strategy("parameter_server(dedicated=true)")
    with pytest.raises(StrategyError, match="4 dedicated servers of 4 ranks; wanted at most 3"):
        build("all_reduce", "parameter_server", 4, 8, dedicated(4))
