"""The clock of programs against the closed forms of the cost model, and where the two must differ."""

import pytest

from penstock.cost import collectives
from penstock.network import Network
from penstock.program import Collective, ProgramBuilder, Slice
from penstock.simulator.program import CodecCost, Uplinks, count_steps, simulate_program
from penstock.strategies import Options, build, names

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
    expected = collectives.ring(NETWORK, p).seconds(4 * n)
    assert seconds("all_reduce", "ring", p, n, block_numel=n) == pytest.approx(expected)


@pytest.mark.parametrize("p", ANY)
@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
def test_spanning_trees_take_their_closed_form(p, operation):
    cost = {"broadcast": collectives.spanning_tree_broadcast, "reduce": collectives.spanning_tree_reduce}[operation]
    n = elements(p)
    for root in {0, p // 2, p - 1}:
        assert seconds(operation, "spanning_tree", p, n, root=root) == pytest.approx(cost(NETWORK, p).seconds(4 * n))


@pytest.mark.parametrize("p", ANY)
@pytest.mark.parametrize("name", ["spanning_tree", "binary_tree"])
def test_reducing_and_broadcasting_trees_take_their_closed_form(p, name):
    if name not in names("all_reduce"):
        pytest.skip(f"no {name} yet")
    n = elements(p)
    expected = collectives.ALL_REDUCE[name](NETWORK, p).seconds(4 * n)
    assert seconds("all_reduce", name, p, n) == pytest.approx(expected)


@pytest.mark.parametrize("p", ANY)
@pytest.mark.parametrize("name", ["recursive_doubling", "halving_doubling", "bidirectional_exchange"])
def test_exchanges_take_their_closed_form_folding_included(p, name):
    """An exchange of more ranks than a power of two begins and ends with whole messages: see `cost.collectives`."""
    if name not in names("all_reduce"):
        pytest.skip(f"no {name} yet")
    n = elements(p) * 16
    expected = collectives.ALL_REDUCE[name](NETWORK, p).seconds(4 * n)
    assert seconds("all_reduce", name, p, n) == pytest.approx(expected)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_a_pipelined_broadcast_takes_one_block_less_than_wangs_formula(p, k):
    """Wang et al. count p-1+n/b steps; the last of p ranks has its last block after p-1 + n/b - 1, as Fig. 2a shows."""
    block, n = 100, 100 * k
    formula = collectives.linear_pipeline_broadcast(NETWORK, p, 4 * block).seconds(4 * n)
    step = ALPHA + BETA * 4 * block
    assert seconds("broadcast", "linear_pipeline", p, n, block_numel=block) == pytest.approx(formula - step)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_a_pipelined_reduce_hides_all_summations_but_one_per_rank(p):
    """The formula adds gamma to every step; merging overlaps the next receipt, so only the last block's are seen."""
    block, k = 100, 8
    step, merge = ALPHA + BETA * 4 * block, GAMMA * 4 * block
    expected = (p - 1 + k - 1) * step + (p - 1) * merge
    assert seconds("reduce", "linear_pipeline", p, block * k, block_numel=block) == pytest.approx(expected)


def test_the_linear_pipeline_fills_once_9_steps_not_10():
    assert count_steps(build("all_reduce", "linear_pipeline", 3, 400, Options(block_numel=100))) == 9
    reduce = count_steps(build("reduce", "linear_pipeline", 3, 400, Options(block_numel=100)))
    broadcast = count_steps(build("broadcast", "linear_pipeline", 3, 400, Options(block_numel=100)))
    assert reduce + broadcast == 10


@pytest.mark.parametrize("p", ANY)
def test_steps_of_ring_and_tree(p):
    assert count_steps(build("all_reduce", "ring", p, elements(p))) == 2 * (p - 1)
    assert count_steps(build("broadcast", "spanning_tree", p, 10)) == collectives.ceil_log2(p)


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


def test_an_oversubscribed_uplink_serialises_what_crosses_it():
    builder = ProgramBuilder("cross", Collective.BROADCAST, 4, 100)
    for source in (0, 1):
        builder.message(source, source + 2, Slice("data", 0, 100), Slice("data", 0, 100))
    program = builder.build()
    step = ALPHA + BETA * 400
    assert simulate_program(program, NETWORK).seconds == pytest.approx(step)
    assert simulate_program(program, NETWORK, uplinks=Uplinks(2, width=1)).seconds == pytest.approx(2 * step)
    assert simulate_program(program, NETWORK, uplinks=Uplinks(2, width=2)).seconds == pytest.approx(step)


def test_the_timeline_names_lanes_and_ranks():
    timeline = simulate_program(exchange(10), NETWORK).timeline
    assert {span.lane for span in timeline.spans} == {"network", "merge"}
    assert {span.rank for span in timeline.spans} == {0, 1}
