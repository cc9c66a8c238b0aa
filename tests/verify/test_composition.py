"""Iterations of several buckets are proved whenever their gradients become ready, and wrong ones are refused."""

from dataclasses import replace

import pytest

from penstock.program import DATA, Collective, Op, Slice
from penstock.program.builder import ProgramBuilder
from penstock.program.composition import Composition, compose, whole_in_halves
from penstock.strategies import Options, build, build_coded_part, build_compressed, build_part
from penstock.verify import Kind, verify


def programs(world_size: int):
    return [
        build("all_reduce", "ring", world_size, 7, Options()),
        build("all_reduce", "double_tree", world_size, 12, Options(block_numel=3)),
        build_compressed("ring", world_size, (0, 9, 14), Options())[0],
        build("all_reduce", "native", world_size, 3, Options()),
        build_compressed("parameter_server", world_size, (0, 5), Options())[0],
        build("all_reduce", "native", world_size, 1, Options()),
        build("all_reduce", "ring", world_size, 1, Options()),
    ]


@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_buckets_in_lanes_are_proved(world_size: int, lanes: int) -> None:
    composition = compose(programs(world_size), lanes)
    proof = verify(composition)
    assert proof.proved, proof.findings[0]
    assert sum(len(rank) for rank in composition.joined().ranks) == sum(
        len(rank) for program in composition.programs for rank in program.ranks
    )


def test_programs_are_dealt_out_in_turn_and_the_engines_own_to_lane_0() -> None:
    assert compose(programs(2), 3).lane_of == (0, 1, 2, 0, 0, 0, 1)


def test_the_proof_waits_with_each_bucket_until_all_before_it_are_done() -> None:
    """The latest that gradients can be ready: every other timing lets instructions be issued earlier."""
    ring = build("all_reduce", "ring", 4, 40, Options())
    assert {verify(compose([ring] * 3, lanes)).steps for lanes in (1, 2, 3)} == {3 * verify(ring).steps}


def exchange(wait_for_other: bool) -> ProgramBuilder:
    """Return an all-reduce of two ranks, whose first rank waits for the second one's data before it sends."""
    made = ProgramBuilder("pair", Collective.ALL_REDUCE, 2, 1)
    made.scratch("other", 1)
    everything = Slice(DATA, 0, 1)
    for rank in (0, 1):
        made.recv(rank, 1 - rank, Slice("other", 0, 1))
        made.send(rank, 1 - rank, everything, after=(0,) if wait_for_other or rank == 0 else ())
        made.merge(rank, everything, Slice("other", 0, 1))
    return made


def test_a_circle_in_one_bucket_is_found_in_the_iteration() -> None:
    good, bad = exchange(False).build(), exchange(True).build()
    assert verify(compose([good, good], 2)).proved
    findings = verify(compose([good, bad, good], 2)).findings
    assert [each.kind for each in findings] == [Kind.DEADLOCK]


def test_a_bucket_that_waits_for_a_later_ones_gradients_is_refused() -> None:
    good = exchange(False).build()
    late = len(good.ranks[0])  # the first instruction of the second bucket: a receive

    class Crossed(Composition):
        def joined(self):
            program = super().joined()
            mine = list(program.ranks[0])
            send = next(index for index, one in enumerate(mine) if one.op is Op.SEND)
            mine[send] = mine[send]._replace(after=(late,))
            return replace(program, ranks=(tuple(mine), *program.ranks[1:]))

    assert verify(Crossed((good, good), (0, 1))).findings


def cut_programs(world_size: int):
    parts = [
        [build_part("all_reduce", "ring", rank, world_size, 40, Options(block_numel=3)) for rank in range(world_size)],
        [build_part("all_reduce", "native", rank, world_size, 3) for rank in range(world_size)],
        [build_coded_part("ring", rank, world_size, (0, 5000, 5014))[0] for rank in range(world_size)],
        [build_coded_part("parameter_server", rank, world_size, (0, 5000))[0] for rank in range(world_size)],
        [build_part("all_reduce", "recursive_doubling", rank, world_size, 4) for rank in range(world_size)],
    ]
    programs, counts = zip(*(whole_in_halves(each) for each in parts), strict=True)
    return programs, counts


@pytest.mark.parametrize("lanes", [1, 2, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_buckets_in_halves_are_proved(world_size: int, lanes: int) -> None:
    programs, counts = cut_programs(world_size)
    composition = compose(programs, lanes, counts)
    proof = verify(composition)
    assert proof.proved, proof.findings[0]
    assert composition.ends()[-1] == tuple(map(len, composition.joined().ranks))
    numbers = [piece.number for piece in composition.pieces]
    assert numbers == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]


def test_a_cut_with_the_ends_of_a_message_in_different_halves_is_refused() -> None:
    programs, counts = cut_programs(2)
    ring, (first, second) = programs[0], counts[0]
    later = next(index for index, one in enumerate(ring.ranks[0]) if index >= first and one.op is Op.RECV)
    findings = verify(compose([ring, ring], 1, [(later + 1, second)] * 2)).findings
    assert findings[0].kind is Kind.MISORDERED
