"""An all-reduce in halves: still proved, both ends of a message in the same half, and no rank waits in a circle."""

import pytest

from penstock.program import Op
from penstock.program.composition import whole_in_halves
from penstock.runtime.executor import WINDOW
from penstock.runtime.schedule import schedule_in_halves, stuck_ranks
from penstock.strategies import Options, build_coded_part, build_part, coded_names, names, sparse_names
from penstock.strategies.pipeline import DEPTH
from penstock.verify import verify
from penstock.verify.matching import match

BOUNDS = (0, 5000, 70_000, 70_010)
WITHOUT = ("native", "hierarchical", "all_gather", *sparse_names())  # pass no finished sums on, or do not say so


def dense(name, world_size):
    options = Options(block_numel=3, partitions=7 if name == "parameter_server" else None)
    return [build_part("all_reduce", name, rank, world_size, 40, options) for rank in range(world_size)]


def coded(name, world_size):
    options = Options(block_numel=4096)
    return [build_coded_part(name, rank, world_size, BOUNDS, options)[0] for rank in range(world_size)]


CASES = [(dense, name) for name in names("all_reduce")] + [(coded, name) for name in (*coded_names(), *sparse_names())]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("make", "name"), CASES, ids=lambda each: each if isinstance(each, str) else each.__name__)
def test_halves_of_every_strategy_are_proved_and_meet_their_own_kind(make, name, world_size):
    program, counts = whole_in_halves(make(name, world_size))
    assert verify(program).proved
    for (sender, sent), (receiver, received) in match(program)[0].recv_of.items():
        assert (sent < counts[sender]) == (received < counts[receiver])
    window = max(WINDOW, DEPTH)
    halves = [schedule_in_halves(each, count, window) for each, count in zip(program.ranks, counts, strict=True)]
    assert stuck_ranks(program, [first + second for first, second in halves]) == []


@pytest.mark.parametrize("make", [dense, coded])
@pytest.mark.parametrize("name", [name for name in names("all_reduce") if name not in WITHOUT])
def test_finished_sums_travel_in_the_second_half_and_nothing_is_added_there(make, name):
    program, counts = whole_in_halves(make(name, 3))
    second = [one.op for rank, count in zip(program.ranks, counts, strict=True) for one in rank[count:]]
    assert Op.MERGE not in second
    assert Op.ENCODE not in second
    assert (Op.SEND in second) == (not (make is coded and name == "recursive_doubling"))


def test_the_halves_of_a_ring_are_its_reduce_scatter_and_its_all_gather():
    program, counts = whole_in_halves(dense("ring", 4))
    sent = [[one for one in rank if one.op is Op.SEND] for rank in program.ranks]
    first = [
        [one for one in rank[:count] if one.op is Op.SEND] for rank, count in zip(program.ranks, counts, strict=True)
    ]
    for all_of_it, before in zip(sent, first, strict=True):
        assert sum(one.read.numel for one in before) == 30  # three of four chunks of ten
        assert sum(one.read.numel for one in all_of_it) == 60
