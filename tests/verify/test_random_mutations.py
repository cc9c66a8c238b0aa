"""Whatever is done to a correct program, `verify` catches it or the program still keeps its promise."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from every_call import dense_calls, sparse_calls
from mutations import change, drop, duplicate, shifted, swap_operands, with_rank
from oracle import meets_its_contract
from penstock.program import Op, Program, Slice
from penstock.strategies import Options, build, coded_names, compressed_program
from penstock.verify import verify

POINT_TO_POINT = [key for key in (*dense_calls(), *sparse_calls()) if key[1] != "native"]
SEEDS = range(12)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    operation, name = draw(st.sampled_from(POINT_TO_POINT))
    world_size = draw(st.integers(2, 6))
    options = Options(block_numel=draw(st.integers(1, 4)), root=draw(st.integers(0, world_size - 1)))
    if operation == "all_reduce" and name in coded_names() and draw(st.booleans()):
        return compressed_program(name, world_size, draw(st.integers(1, 12)), options)
    return build(operation, name, world_size, draw(st.integers(1, 12)), options)


@st.composite
def mutants(draw: st.DrawFn) -> Program:
    program = draw(programs())
    rank = draw(st.sampled_from([rank for rank, own in enumerate(program.ranks) if own]))
    index = draw(st.integers(0, len(program.ranks[rank]) - 1))
    one = program.ranks[rank][index]
    kind = draw(st.sampled_from(["drop", "duplicate", "retarget", "release", "shift", "swap", "copy", "reorder"]))
    if kind == "drop":
        return drop(program, rank, index)
    if kind == "duplicate":
        return duplicate(program, rank, index)
    if kind == "retarget":
        assume(one.peer is not None)
        return change(program, rank, index, peer=draw(st.integers(0, program.world_size - 1)))
    if kind == "release":
        assume(one.after)
        gone = draw(st.sampled_from(one.after))
        return change(program, rank, index, after=tuple(other for other in one.after if other != gone))
    if kind == "shift":
        field = "write" if one.write is not None else "read"
        return change(program, rank, index, **{field: _within(program, getattr(one, field), draw(st.integers(-3, 3)))})
    if kind == "copy":
        assume(one.op is Op.MERGE)
        return change(program, rank, index, op=Op.COPY)
    other = draw(st.integers(0, len(program.ranks[rank]) - 1))
    if kind == "swap":
        assume(program.ranks[rank][other].op is one.op)
        return swap_operands(program, rank, index, other)
    return _move_first(program, rank, index)


def _within(program: Program, touched: Slice, by: int) -> Slice:
    numel = program.buffer(touched.buffer).numel
    by = max(-touched.start, min(by, numel - touched.stop))
    assume(by != 0)
    return shifted(touched, by)


def _move_first(program: Program, rank: int, index: int) -> Program:
    """Issue an instruction before all others, with its dependencies lost."""
    instructions = list(program.ranks[rank])
    first = instructions.pop(index)._replace(after=())
    number = {old: old + 1 if old < index else old for old in range(len(program.ranks[rank]))} | {index: 0}
    moved = [one._replace(after=tuple(sorted(number[old] for old in one.after))) for one in instructions]
    return with_rank(program, rank, [first, *moved])


@settings(max_examples=60)
@given(programs())
def test_a_program_that_is_proved_keeps_its_promise_whatever_the_timing(program):
    assert verify(program).proved
    assert all(meets_its_contract(program, seed) for seed in SEEDS)


@settings(max_examples=400)
@given(mutants())
def test_a_mutant_is_caught_unless_it_keeps_its_promise_whatever_the_timing(mutant):
    if verify(mutant).proved:
        assert all(meets_its_contract(mutant, seed) for seed in SEEDS)


def test_the_judge_itself_sees_the_common_mistakes():
    program = build("all_reduce", "ring", 3, 9)
    merge = next(index for index, one in enumerate(program.ranks[0]) if one.op is Op.MERGE)
    recv = next(index for index, one in enumerate(program.ranks[0]) if one.op is Op.RECV)
    for broken in (drop(program, 0, merge), duplicate(program, 0, merge), drop(program, 0, recv)):
        assert not any(meets_its_contract(broken, seed) for seed in SEEDS)
    raced = change(program, 0, merge, after=())
    assert not all(meets_its_contract(raced, seed) for seed in SEEDS)
