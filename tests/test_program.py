import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StrategyError
from penstock.program import DATA, Collective, Instruction, Op, Slice, split
from penstock.program.builder import ProgramBuilder
from penstock.verify import verify


def builder(world_size: int = 2, numel: int = 6, collective: Collective = Collective.ALL_REDUCE) -> ProgramBuilder:
    made = ProgramBuilder("made", collective, world_size, numel)
    made.scratch("box", numel)
    return made


def data(start: int, stop: int) -> Slice:
    return Slice(DATA, start, stop)


def box(start: int, stop: int) -> Slice:
    return Slice("box", start, stop)


def test_a_merge_waits_for_the_recv_that_fills_it_and_the_send_that_still_reads():
    made = builder()
    for rank in (0, 1):
        made.message(rank, 1 - rank, data(0, 6), box(0, 6))
    for rank in (0, 1):
        made.merge(rank, data(0, 6), box(0, 6))
    assert [one.after for one in made.build().ranks[0]] == [(), (), (0, 1)]


def test_instructions_on_different_elements_do_not_wait_for_one_another():
    made = builder()
    made.send(0, 1, data(0, 3))
    made.recv(0, 1, data(3, 6))
    made.send(0, 1, data(0, 3))  # reading twice is no conflict
    assert [one.after for one in made.build().ranks[0]] == [(), (), ()]


def test_a_write_waits_for_the_readers_and_through_them_for_the_writer():
    made = builder()
    made.recv(0, 1, data(0, 6))
    made.send(0, 1, data(0, 2))
    made.send(0, 1, data(4, 6))
    made.recv(0, 1, data(0, 6))
    assert made.build().ranks[0][3].after == (0, 1, 2)  # 0 because nobody has read data[2:4]


def test_in_turn_makes_a_send_wait_for_the_one_before():
    made = builder(3)
    made.send(0, 1, data(0, 6))
    made.send(0, 2, data(0, 6), in_turn=True)
    assert made.build().ranks[0][1].after == (0,)


def test_nothing_is_issued_for_no_elements():
    made = builder()
    made.message(0, 1, data(2, 2), box(3, 3))
    made.merge(0, data(1, 1), box(1, 1))
    made.native(0, data(0, 0))
    assert made.build().ranks == ((), ())


def test_operands_of_different_size_are_refused():
    with pytest.raises(StrategyError, match=r"made: data\[0:3\] does not fit box\[0:2\]"):
        builder().message(0, 1, data(0, 3), box(0, 2))


def test_an_included_program_has_its_ranks_renamed_and_its_dependencies_kept():
    part = builder(2)
    part.message(0, 1, data(0, 6), box(0, 6))
    part.merge(1, data(0, 6), box(0, 6))
    whole = ProgramBuilder("whole", Collective.REDUCE, 3, 6, root=0)
    whole.include(part.build(), (2, 0), "first")
    whole.include(part.build(), (1, 0), "second")
    program = whole.build()
    assert [str(one) for one in program.ranks[0]] == [
        "recv   first.box[0:6] <- 2",
        "merge  data[0:6] += first.box[0:6] (0,)",
        "recv   second.box[0:6] <- 1",
        "merge  data[0:6] += second.box[0:6] (1, 2)",
    ]
    assert verify(program).proved


def test_a_program_prints_its_ranks_and_instructions():
    made = builder()
    made.message(0, 1, data(0, 2), box(4, 6))
    assert str(made.build()).splitlines() == [
        "all_reduce by made, 2 ranks, 6 elements",
        "rank 0",
        "    0 send   data[0:2] -> 1",
        "rank 1",
        "    0 recv   box[4:6] <- 0",
    ]


@given(st.integers(0, 200), st.integers(1, 40))
def test_split_covers_everything_in_order_and_evenly(numel, parts):
    pieces = split(numel, parts)
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
    assert pieces[-1][1] == numel
    sizes = [stop - start for start, stop in pieces]
    assert max(sizes) - min(sizes) <= 1


@st.composite
def straight_line(draw):
    """Random computations of one rank, as (op, write, read)."""
    slices = st.builds(lambda buffer, start: (buffer, start), st.sampled_from([DATA, "box"]), st.integers(0, 4))
    lines = draw(st.lists(st.tuples(slices, slices, st.integers(1, 2)), max_size=8))
    return [(Slice(w[0], w[1], w[1] + n), Slice(r[0], r[1], r[1] + n)) for w, r, n in lines]


@given(straight_line())
def test_every_conflict_is_ordered(lines):
    made = builder()
    for write, read in lines:
        made.copy(0, write, read)
    instructions = made.build().ranks[0]
    before = [closure(instructions, index) for index in range(len(instructions))]
    for later, (write, read) in enumerate(lines):
        for earlier, (old_write, old_read) in enumerate(lines[:later]):
            if write.overlaps(old_write) or write.overlaps(old_read) or read.overlaps(old_write):
                assert earlier in before[later]


def closure(instructions: tuple[Instruction, ...], index: int) -> set[int]:
    found = set(instructions[index].after)
    for one in instructions[index].after:
        found |= closure(instructions, one)
    return found


def test_every_op_has_a_way_to_be_issued():
    made = ProgramBuilder("all", Collective.ALL_REDUCE, 1, 2)
    made.scratch("coded", 2, encoded=True)
    made.scratch("box", 2)
    made.encode(0, Slice("coded", 0, 2), data(0, 2))
    made.decode(0, box(0, 2), Slice("coded", 0, 2))
    made.merge(0, data(0, 2), box(0, 2))
    made.copy(0, data(0, 2), box(0, 2))
    made.native(0, data(0, 2))
    assert [one.op for one in made.build().ranks[0]] == [Op.ENCODE, Op.DECODE, Op.MERGE, Op.COPY, Op.NATIVE]
