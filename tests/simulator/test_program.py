"""The clock of programs against the closed forms of the cost model, and where the two must differ."""

import pytest

from penstock.cost import papers
from penstock.network import Network
from penstock.program import Collective, Op, Slice
from penstock.program.builder import ProgramBuilder
from penstock.simulator.program import CodecCost, count_steps, simulate_program
from penstock.strategies import (
    STRATEGIES,
    Options,
    bidirectional_exchange,
    build,
    compressed_program,
    halving_doubling,
    linear_pipeline,
    parameter_server,
    ring,
    spanning_tree,
)
from penstock.strategies.closed_form import ceil_log2

ALPHA, BETA, GAMMA = 1e-3, 1e-6, 1e-7
NETWORK = Network(1, ALPHA, BETA, GAMMA)
POWERS = [1, 2, 4, 8, 16]
ANY = [1, 2, 3, 4, 5, 7, 8, 12, 16]


def seconds(operation, name, p, numel, network=NETWORK, **options):
    return simulate_program(build(operation, name, p, numel, Options(**options)), network).seconds


def elements(p):
    return 240 * p  # divisible, so that chunks are equal as the closed forms have them


@pytest.mark.parametrize("p", ANY)
def test_ring_takes_its_closed_form(p):
    n = elements(p)
    expected = ring.cost(NETWORK, p).seconds(4 * n)
    assert seconds("all_reduce", "ring", p, n, block_numel=n) == pytest.approx(expected)


@pytest.mark.parametrize("p", ANY)
@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
def test_spanning_trees_take_their_closed_form(p, operation):
    cost = {"broadcast": spanning_tree.broadcast_cost, "reduce": spanning_tree.reduce_cost}[operation]
    n = elements(p)
    for root in {0, p // 2, p - 1}:
        assert seconds(operation, "spanning_tree", p, n, root=root) == pytest.approx(cost(NETWORK, p).seconds(4 * n))


@pytest.mark.parametrize("p", ANY)
@pytest.mark.parametrize("name", ["spanning_tree", "binary_tree"])
def test_reducing_and_broadcasting_trees_take_their_closed_form(p, name):
    n = elements(p)
    expected = STRATEGIES[name].cost(NETWORK, p, Options()).seconds(4 * n)
    assert seconds("all_reduce", name, p, n) == pytest.approx(expected)


@pytest.mark.parametrize("p", ANY)
@pytest.mark.parametrize("name", ["recursive_doubling", "halving_doubling"])
def test_exchanges_take_their_closed_form_folding_included(p, name):
    """An exchange of more ranks than a power of two begins and ends with whole messages: see `closed_form`."""
    n = elements(p) * 16
    expected = STRATEGIES[name].cost(NETWORK, p, Options()).seconds(4 * n)
    assert seconds("all_reduce", name, p, n) == pytest.approx(expected)


@pytest.mark.parametrize("p", POWERS)
def test_bidirectional_exchange_takes_its_closed_form_on_powers_of_two(p):
    """Its broadcast gathers by exchange, log p startups, where Wang et al. count MPI's ring with p-1."""
    n = elements(p) * 16
    all_reduce = halving_doubling.cost(NETWORK, p).seconds(4 * n)
    reduce = bidirectional_exchange.reduce_cost(NETWORK, p).seconds(4 * n)
    broadcast = bidirectional_exchange.broadcast_cost(NETWORK, p).seconds(4 * n)
    saved = (p - 1 - ceil_log2(p)) * ALPHA
    assert seconds("all_reduce", "bidirectional_exchange", p, n) == pytest.approx(all_reduce)
    assert seconds("reduce", "bidirectional_exchange", p, n) == pytest.approx(reduce)
    assert seconds("broadcast", "bidirectional_exchange", p, n) == pytest.approx(broadcast - saved)


@pytest.mark.parametrize("p", [3, 5, 6, 7, 12, 13])
def test_bidirectional_exchange_of_odd_worlds_sends_less_than_folding_for_a_few_more_startups(p):
    """It does not fold: a rank without a partner shares another's, level by level, so whole messages never travel."""
    n = elements(p) * 16
    free_startups, free_bytes = Network(1, 0.0, BETA, GAMMA), Network(1, ALPHA, 0.0, 0.0)
    closed = halving_doubling.cost
    bytes_only = seconds("all_reduce", "bidirectional_exchange", p, n, free_startups)
    startups_only = seconds("all_reduce", "bidirectional_exchange", p, n, free_bytes)
    assert bytes_only < closed(free_startups, p).seconds(4 * n)
    assert startups_only <= closed(free_bytes, p).seconds(4 * n) + 2 * ceil_log2(p) * ALPHA


SERVERS = [{}, {"servers": 1}, {"servers": 2}, {"servers": 1, "dedicated": True}]


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("options", SERVERS, ids=str)
def test_parameter_servers_take_push_and_pull(p, options):
    """All parts travel at once, without conflict; a server sends itself nothing."""
    n, chosen = elements(p), Options(**options)
    free_sums = Network(1, ALPHA, BETA, 0.0)
    found = seconds("all_reduce", "parameter_server", p, n, free_sums, **options)
    assert found == pytest.approx(parameter_server.cost(free_sums, p, chosen).seconds(4 * n))
    whole = parameter_server.cost(NETWORK, p, chosen).seconds(4 * n)  # summing one part overlaps receiving the next
    assert found < seconds("all_reduce", "parameter_server", p, n, **options) <= whole * (1 + 1e-9)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_double_trees_send_every_byte_twice_whatever_table_2_says(p):
    """Table 2's slope is beta + gamma, less than any all-reduce can do."""
    free = Network(1, 1e-9, BETA, 0.0)
    n = 1 << 20
    found = seconds("all_reduce", "double_tree", p, n, free, block_numel=n // 256)
    assert papers.double_tree(free, p).seconds(4 * n) < found
    assert 2 * (p - 1) / p * BETA * 4 * n <= found < 1.25 * 2 * BETA * 4 * n


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_a_pipelined_broadcast_takes_one_block_less_than_wangs_formula(p, k):
    """Wang et al. count p-1+n/b steps; the last of p ranks has its last block after p-1 + n/b - 1, as Fig. 2a shows."""
    block, n = 100, 100 * k
    formula = linear_pipeline.broadcast_cost(NETWORK, p, block_nbytes=4 * block).seconds(4 * n)
    step = ALPHA + BETA * 4 * block
    assert seconds("broadcast", "linear_pipeline", p, n, block_numel=block) == pytest.approx(formula - step)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_a_pipelined_reduce_hides_all_summations_but_one_per_rank(p):
    """The formula adds gamma to every step; merging overlaps the next receipt, so only the last block's are seen."""
    block, k = 100, 8
    step, merge = ALPHA + BETA * 4 * block, GAMMA * 4 * block
    expected = (p - 1 + k - 1) * step + (p - 1) * merge
    assert seconds("reduce", "linear_pipeline", p, block * k, block_numel=block) == pytest.approx(expected)


@pytest.mark.parametrize("k", [16, 256])
def test_two_ranks_pipe_blocks_one_way_and_sums_the_other(k):
    """Table 1 has twice that."""
    block = 4096
    formula = linear_pipeline.cost(NETWORK, 2, block_nbytes=4 * block).seconds(4 * block * k)
    found = seconds("all_reduce", "linear_pipeline", 2, block * k, block_numel=block)
    assert formula == pytest.approx(found, rel=0.01 + NETWORK.gamma_seconds_per_byte / NETWORK.beta_seconds_per_byte)


def test_the_linear_pipeline_fills_once_9_steps_not_10():
    assert count_steps(build("all_reduce", "linear_pipeline", 3, 400, Options(block_numel=100))) == 9
    reduce = count_steps(build("reduce", "linear_pipeline", 3, 400, Options(block_numel=100)))
    broadcast = count_steps(build("broadcast", "linear_pipeline", 3, 400, Options(block_numel=100)))
    assert reduce + broadcast == 10


@pytest.mark.parametrize("p", ANY)
def test_steps_of_ring_and_tree(p):
    assert count_steps(build("all_reduce", "ring", p, elements(p))) == 2 * (p - 1)
    assert count_steps(build("broadcast", "spanning_tree", p, 10)) == ceil_log2(p)


def test_a_native_call_takes_what_the_engine_takes_on_all_ranks():
    program = build("all_reduce", "native", 4, 100)
    assert simulate_program(program, NETWORK, native_seconds=lambda nbytes: nbytes * 1e-3).seconds == pytest.approx(0.4)


def exchange(numel, encoded=False):
    """Two ranks swap and add everything."""
    builder = ProgramBuilder("swap", Collective.ALL_REDUCE, 2, numel)
    builder.scratch("other", numel, encoded)
    data, other = Slice("data", 0, numel), Slice("other", 0, numel)
    packed = Slice("packed", 0, numel) if encoded else data
    if encoded:
        builder.scratch("packed", numel, encoded=True)
        for rank in (0, 1):
            builder.encode(rank, packed, data)
    for rank in (0, 1):
        builder.message(rank, 1 - rank, packed, other)
    for rank in (0, 1):
        builder.merge(rank, data, other)
    return builder.build()


def test_links_are_full_duplex():
    expected = ALPHA + BETA * 400 + GAMMA * 400
    assert simulate_program(exchange(100), NETWORK).seconds == pytest.approx(expected)


def test_a_codec_shrinks_messages_and_costs_time():
    codec = CodecCost(ratio=0.25, seconds=lambda op, nbytes: 1e-5 * nbytes)
    expected = 1e-5 * 400 + ALPHA + BETA * 100 + GAMMA * 400 + 1e-5 * 400  # encode, send, decode while merging
    assert simulate_program(exchange(100, encoded=True), NETWORK, codec=codec).seconds == pytest.approx(expected)


def test_the_timeline_names_lanes_and_ranks():
    timeline = simulate_program(exchange(10), NETWORK).timeline
    assert {span.lane for span in timeline.spans} == {"network", "merge"}
    assert {span.rank for span in timeline.spans} == {0, 1}


def test_a_compressed_ring_of_two_takes_two_of_everything_in_a_row():
    """encode, send, decode-and-merge; encode the sum, send, decode: the other chunk does the same beside it."""
    network = Network(workers=2, alpha_seconds=1.0, beta_seconds_per_byte=0.1, gamma_seconds_per_byte=0.01)
    seconds = {Op.ENCODE: 3.0, Op.DECODE: 2.0}
    codec = CodecCost(ratio=0.25, seconds=lambda op, nbytes: seconds[op])
    program = compressed_program("ring", 2, 20, Options())
    send, merge = 1.0 + 0.1 * 0.25 * 40, 0.01 * 40 + 2.0
    timing = simulate_program(program, network, codec=codec)
    assert timing.seconds == pytest.approx(3.0 + send + merge + 3.0 + send + 2.0)  # its own sum is decoded meanwhile


def test_cutting_a_compressed_ring_into_blocks_hides_encoding_behind_sending():
    network = Network(workers=4, alpha_seconds=1e-4, beta_seconds_per_byte=8e-9, gamma_seconds_per_byte=1e-11)
    codec = CodecCost(1 / 8, lambda op, nbytes: 1e-9 * nbytes)
    whole, cut = (
        simulate_program(compressed_program("ring", 4, 1 << 22, Options(block_numel=block)), network, codec=codec)
        for block in (1 << 20, 1 << 18)
    )
    assert cut.seconds < 0.85 * whole.seconds
