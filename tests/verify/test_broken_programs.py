"""Programs broken on purpose, each of which must be caught by the name of what is wrong with it."""

from dataclasses import replace

import pytest

from mutations import change, drop, duplicate, find, shifted, swap_operands, with_rank
from penstock.errors import StrategyError
from penstock.program import DATA, Buffer, Collective, Instruction, Op, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.strategies import Options, build
from penstock.verify import Kind, require_proof, verify

RING = build("all_reduce", "ring", 3, 9)
TREE = build("reduce", "spanning_tree", 4, 6)
PIPE = build("broadcast", "linear_pipeline", 3, 8, Options(block_numel=2))
UNEVEN = build("broadcast", "linear_pipeline", 2, 5, Options(block_numel=2))


def encoded_exchange() -> Program:
    """Two ranks exchange encoded data; each also decodes its own, so that both end with the same bits."""
    builder = ProgramBuilder("encoded_exchange", Collective.ALL_REDUCE, 2, 4)
    for name in ("own", "other"):
        builder.scratch(name, 4, encoded=True)
    data, own, other = (Slice(name, 0, 4) for name in (DATA, "own", "other"))
    for rank in range(2):
        builder.encode(rank, own, data)
    for rank in range(2):
        builder.message(rank, 1 - rank, own, other)
    for rank in range(2):
        builder.decode(rank, data, own)
        builder.merge(rank, data, other)
    return builder.build()


CODED = encoded_exchange()


def only_kinds(program: Program) -> set[Kind]:
    return {finding.kind for finding in verify(program).findings}


@pytest.mark.parametrize("program", [RING, TREE, PIPE, UNEVEN, CODED], ids=lambda program: program.strategy)
def test_the_programs_are_right_before_they_are_broken(program):
    assert verify(program).proved


def test_a_dropped_merge_is_a_missing_contribution():
    broken = drop(TREE, 0, find(TREE, 0, Op.MERGE))
    finding = verify(broken).findings[0]
    assert (finding.kind, finding.rank) == (Kind.MISSING, 0)
    assert "data[0:6] ends without the data of ranks" in str(finding)


def test_a_repeated_merge_is_a_doubled_contribution_with_rank_instruction_and_step():
    index = find(RING, 2, Op.MERGE)
    finding = verify(duplicate(RING, 2, index)).findings[0]
    assert (finding.kind, finding.rank, finding.index, finding.step) == (Kind.DOUBLED, 2, index + 1, 1)
    assert str(finding).startswith(f"doubled contribution: rank 2, instruction {index + 1}, step 1: `merge data[")
    assert "adds rank 1's part to element 3 a second time" in str(finding)


def test_a_merge_into_the_wrong_place_is_a_wrong_element():
    index = find(RING, 0, Op.MERGE)
    read = RING.ranks[0][index].read
    builder_order = change(RING, 0, index, write=shifted(RING.ranks[0][index].write, -1), read=read)
    assert Kind.WRONG_ELEMENT in only_kinds(builder_order)


def test_a_result_received_in_the_wrong_place_is_a_wrong_element():
    program = Program(
        "shifted", Collective.BROADCAST, 2, 4,
        ((Instruction(Op.SEND, read=Slice(DATA, 0, 3), peer=1),), (Instruction(Op.RECV, Slice(DATA, 1, 4), peer=0),)),
    )  # fmt: skip
    finding = next(one for one in verify(program).findings if one.kind is Kind.WRONG_ELEMENT)
    assert (finding.rank, finding.index) == (1, 0)
    assert "data[1:4] ends with elements 0 to 3" in str(finding)


def test_a_dropped_recv_leaves_an_unmatched_send():
    finding = verify(drop(PIPE, 2, find(PIPE, 2, Op.RECV))).findings[0]
    assert (finding.kind, finding.rank, finding.step) == (Kind.UNMATCHED_SEND, 1, 5)
    assert "is received by no rank: 1 -> 2 has 4 sends and 3 recvs" in str(finding)


def test_a_dropped_send_leaves_an_unmatched_recv():
    finding = verify(drop(PIPE, 0, find(PIPE, 0, Op.SEND))).findings[0]
    assert (finding.kind, finding.rank, finding.step) == (Kind.UNMATCHED_RECV, 1, 1)
    assert "waits for a message that no rank sends: 0 -> 1 has 3 sends and 4 recvs" in str(finding)


def test_a_shortened_send_is_a_size_mismatch():
    broken = change(PIPE, 0, 0, read=Slice(DATA, 0, 1))
    finding = verify(broken).findings[0]
    assert (finding.kind, finding.rank, finding.index) == (Kind.SIZE_MISMATCH, 0, 0)
    assert "(1 dense elements) is message 0 of 0 -> 1 and meets `recv data[0:2] <- 0` (2 dense" in str(finding)


def test_sends_of_different_size_in_the_wrong_order_are_misordered():
    assert only_kinds(swap_operands(UNEVEN, 0, 0, 1)) == {Kind.MISORDERED}


def test_sends_of_equal_size_in_the_wrong_order_are_misordered():
    program = build("reduce", "linear_pipeline", 2, 4, Options(block_numel=2))
    sends = [index for index, one in enumerate(program.ranks[1]) if one.op is Op.SEND]
    finding = verify(swap_operands(program, 1, *sends)).findings[0]
    assert finding.kind is Kind.MISORDERED
    assert "adds element 2 to element 0" in str(finding)


def test_a_merge_from_an_empty_slot_is_a_read_before_write():
    index = find(RING, 1, Op.MERGE)
    empty = shifted(RING.ranks[1][index].read, 9)
    finding = verify(change(RING, 1, index, read=empty)).findings[0]
    assert finding.kind is Kind.READ_BEFORE_WRITE
    assert f"reads {empty}, which nothing has filled" in str(finding)


def test_a_merge_that_does_not_wait_for_its_recv_is_a_race():
    index = find(RING, 1, Op.MERGE)
    finding = verify(change(RING, 1, index, after=())).findings[0]
    assert (finding.kind, finding.rank, finding.index, finding.step) == (Kind.RACE, 1, index, 1)
    assert "does not wait for instruction 0, `recv inbox[0:3] <- 0`" in str(finding)


def test_a_recv_over_data_still_being_sent_is_a_race():
    index = find(RING, 0, Op.RECV, lambda one: one.write is not None and one.write.buffer == DATA)
    assert Kind.RACE in only_kinds(change(RING, 0, index, after=()))


def test_ranks_that_wait_for_one_another_are_a_deadlock_that_names_them():
    def rank(source: int, target: int) -> tuple[Instruction, ...]:
        received = Instruction(Op.RECV, Slice("box", 0, 2), peer=source)
        return received, Instruction(Op.SEND, read=Slice(DATA, 0, 2), peer=target, after=(0,))

    ranks = (rank(2, 1), rank(0, 2), rank(1, 0))
    program = Program("circle", Collective.REDUCE, 3, 2, ranks, (Buffer("box", 2),))
    finding = verify(program).findings[0]
    assert finding.kind is Kind.DEADLOCK
    assert "ranks wait for one another: 0 -> 2 -> 1 -> 0" in str(finding)


def test_a_slice_beyond_its_buffer_is_out_of_bounds():
    finding = verify(change(PIPE, 0, 3, read=Slice(DATA, 7, 9))).findings[0]
    assert (finding.kind, finding.rank, finding.index) == (Kind.OUT_OF_BOUNDS, 0, 3)
    assert "touches data[7:9]; the buffer has 8 elements" in str(finding)


def test_an_encoded_message_into_a_dense_buffer_is_a_mix_up():
    index = find(CODED, 1, Op.RECV)
    dense = replace(CODED, buffers=(*CODED.buffers, Buffer("plain", 4)))
    broken = change(dense, 1, index, write=Slice("plain", 0, 4))
    assert Kind.ENCODING in only_kinds(broken)


def test_a_merge_of_dense_data_into_an_encoded_buffer_is_a_mix_up():
    index = find(CODED, 0, Op.MERGE)
    broken = change(CODED, 0, index, write=Slice("own", 0, 4), read=Slice(DATA, 0, 4))
    assert only_kinds(broken) == {Kind.ENCODING}


def test_encoding_what_is_encoded_is_a_mix_up():
    broken = change(CODED, 0, 0, read=Slice("other", 0, 4))
    finding = verify(broken).findings[0]
    assert finding.kind is Kind.ENCODING
    assert "writes encoded elements from encoded ones" in str(finding)


def test_decoding_part_of_a_codec_output_cuts_it():
    index = find(CODED, 0, Op.DECODE)
    broken = change(CODED, 0, index, write=Slice(DATA, 0, 2), read=Slice("own", 0, 2))
    assert Kind.CUT_ENCODING in only_kinds(broken)


def test_a_rank_that_keeps_its_own_dense_data_gets_other_bits():
    broken = drop(CODED, 0, find(CODED, 0, Op.DECODE))
    finding = verify(broken).findings[0]
    assert finding.kind is Kind.DIFFERENT_SUMS
    assert "coded otherwise, than on rank 0" in str(finding)


def test_a_different_order_of_summation_is_found():
    builder = ProgramBuilder("own_order", Collective.ALL_REDUCE, 3, 2)
    data = Slice(DATA, 0, 2)
    for step in (1, 2):
        builder.scratch(f"box{step}", 2)
        for rank in range(3):
            builder.message(rank, (rank + step) % 3, data, Slice(f"box{step}", 0, 2))
    for rank in range(3):
        builder.merge(rank, data, Slice("box1", 0, 2))
        builder.merge(rank, data, Slice("box2", 0, 2))
    assert only_kinds(builder.build()) == {Kind.DIFFERENT_SUMS}


def test_a_message_to_itself_is_found():
    assert only_kinds(change(PIPE, 0, 0, peer=0)) == {Kind.SELF_MESSAGE}


def test_a_dependency_on_a_later_instruction_is_found():
    finding = verify(change(PIPE, 1, 0, after=(1,))).findings[0]
    assert finding.kind is Kind.LATER_DEPENDENCY
    assert "waits for instruction 1; wanted one before 0" in str(finding)


def test_a_copy_where_a_merge_belongs_is_an_overwritten_contribution():
    index = find(TREE, 0, Op.MERGE)
    finding = verify(change(TREE, 0, index, op=Op.COPY)).findings[0]
    assert (finding.kind, finding.rank, finding.index, finding.step) == (Kind.OVERWRITTEN, 0, index, 1)
    assert "it was there before this instruction replaced it" in str(finding)


def test_a_broadcast_that_adds_has_a_foreign_contribution():
    builder = ProgramBuilder("adding", Collective.BROADCAST, 2, 2)
    builder.scratch("box", 2)
    builder.message(0, 1, Slice(DATA, 0, 2), Slice("box", 0, 2))
    builder.merge(1, Slice(DATA, 0, 2), Slice("box", 0, 2))
    assert only_kinds(builder.build()) == {Kind.FOREIGN}


def test_a_rank_without_the_native_call_is_found():
    program = build("all_reduce", "native", 3, 4)
    finding = verify(with_rank(program, 2, [])).findings[0]
    assert finding.kind is Kind.UNMATCHED_NATIVE
    assert "rank 2 never makes it" in str(finding)


def test_native_calls_on_different_slices_do_not_fit():
    program = build("all_reduce", "native", 3, 4)
    assert only_kinds(change(program, 1, 0, write=Slice(DATA, 0, 3))) == {Kind.SIZE_MISMATCH}


@pytest.mark.parametrize(
    ("instruction", "kind"),
    [
        (Instruction(Op.SEND, peer=1), Kind.MALFORMED),
        (Instruction(Op.MERGE, Slice(DATA, 0, 2), Slice(DATA, 2, 4), peer=1), Kind.MALFORMED),
        (Instruction(Op.SEND, read=Slice("nowhere", 0, 2), peer=1), Kind.UNKNOWN_BUFFER),
        (Instruction(Op.SEND, read=Slice(DATA, 0, 2), peer=3), Kind.UNKNOWN_RANK),
        (Instruction(Op.COPY, Slice(DATA, 0, 2), Slice(DATA, 2, 5)), Kind.UNEVEN_OPERANDS),
        (Instruction(Op.SEND, read=Slice(DATA, 2, 2), peer=1), Kind.OUT_OF_BOUNDS),
    ],
)
def test_an_instruction_that_makes_no_sense_is_found(instruction, kind):
    assert only_kinds(with_rank(PIPE, 0, [instruction])) == {kind}


def test_require_proof_raises_with_the_first_mistake():
    with pytest.raises(StrategyError, match="linear_pipeline on 3 ranks: unmatched recv: rank 1, instruction"):
        require_proof(drop(PIPE, 0, 0))
