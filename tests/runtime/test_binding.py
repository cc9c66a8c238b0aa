"""Every position of data is multiplied once, and not before it is read."""

import pytest

from penstock.program import Op
from penstock.runtime.binding import at_encodes, at_first_touch, is_power_of_two
from penstock.strategies import Options, build_compressed, coded_names


def compressed(strategy, world_size):
    return build_compressed(strategy, world_size, (0, 9000, 9010, 40_000), Options(block_numel=3000))[0]


@pytest.mark.parametrize("strategy", coded_names())
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("choose", [at_first_touch, at_encodes])
def test_every_position_is_multiplied_once(strategy, world_size, choose):
    program = compressed(strategy, world_size)
    for instructions in program.ranks:
        multiplied = [position for positions in choose(instructions).at.values() for position in positions]
        assert sorted(multiplied) == list(range(program.numel))


def test_in_a_ring_all_is_multiplied_where_it_is_encoded():
    for instructions in compressed("ring", 4).ranks:
        late = at_encodes(instructions)
        assert {instructions[index].op for index in late.at} == {Op.ENCODE}
        assert {instructions[index].op for index in late.before} == {Op.MERGE}
        first = at_first_touch(instructions)
        assert {instructions[index].op for index in first.at} == {Op.ENCODE, Op.MERGE}
        assert not first.before


@pytest.mark.parametrize("strategy", coded_names())
def test_what_is_added_before_the_encode_is_divided_and_nothing_after_it(strategy):
    for instructions in compressed(strategy, 4).ranks:
        late = at_encodes(instructions)
        when = {position: index for index, positions in late.at.items() for position in positions}
        for index, positions in late.before.items():
            assert all(index < when[position] for position in positions)


def test_only_powers_of_two_round_nothing():
    assert [is_power_of_two(1 / count) for count in (1, 2, 3, 4, 6, 8, 1024)] == [
        True,
        True,
        False,
        True,
        False,
        True,
        True,
    ]
