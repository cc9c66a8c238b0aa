"""Compressed all-reduces are proved for every world size; broken ones are caught by name."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from every_call import dense_calls
from mutations import change, drop, duplicate, find
from penstock.program import DATA, Buffer, Instruction, Op, Slice
from penstock.strategies import (
    STRATEGIES,
    Options,
    build,
    build_coded_part,
    build_compressed,
    coded_names,
    compressed_program,
)
from penstock.verify import Kind, require_proof, verify

RING = compressed_program("ring", 3, 3, Options(block_numel=1))
QUADRATIC = ("all_gather", "recursive_doubling")  # messages grow as the square of the world size


@pytest.mark.parametrize("name", coded_names())
def test_it_is_proved_for_all_world_sizes_to_33(name: str) -> None:
    for world_size in range(1, 34):
        for numel in (1 if name in QUADRATIC else 2,) if world_size > 9 else (0, 1, world_size - 1, world_size + 2):
            options = Options(block_numel=1, ranks_per_node=3)
            assert require_proof(compressed_program(name, world_size, numel, options)).proved


@pytest.mark.parametrize("name", coded_names())
def test_it_is_proved_for_blocks_of_elements_and_for_batches(name: str) -> None:
    for world_size in (2, 3, 6, 9):
        bounds = [0, 5000, 5001, 5001, 40_000, 43_000]
        for options in (Options(), Options(partitions=1), Options(partitions=5, block_numel=2000)):
            program, batches = build_compressed(name, world_size, bounds, options)
            assert require_proof(program).proved
            assert program.numel == len(batches.pieces)
            assert sorted(piece for batch in batches.pieces for piece in batch)[0][0] == 0
            assert (sum(batches.sizes), min(batches.sizes) > 0) == (43_000, True)
        if name not in QUADRATIC:
            assert require_proof(compressed_program(name, world_size, 41, Options(block_numel=2))).proved


SERIAL = [name for name in coded_names() if "serial" in STRATEGIES[name].options]


@pytest.mark.parametrize("name", SERIAL)
def test_one_that_is_serial_is_proved_and_computes_nothing_while_it_sends(name: str) -> None:
    for world_size, partitions in product((1, 2, 3, 4, 5, 8), (None, 1, 3, 16)):
        for bounds in ([0, 100], [0, 5000, 5001, 40_000]):
            program, _ = build_compressed(name, world_size, bounds, Options(partitions=partitions, serial=True))
            assert require_proof(program).proved
            for instructions in program.ranks:
                before = [transitive(instructions, index) for index in range(len(instructions))]
                sends = [index for index, one in enumerate(instructions) if one.op is Op.SEND]
                for index, one in enumerate(instructions):
                    if one.op not in (Op.SEND, Op.RECV):
                        assert all(other in before[index] or index in before[other] for other in sends)


def transitive(instructions: Sequence[Instruction], index: int) -> set[int]:
    """Return all that an instruction waits for, directly or not."""
    found, left = set[int](), list(instructions[index].after)
    while left:
        if (one := left.pop()) not in found:
            found.add(one)
            left += instructions[one].after
    return found


@pytest.mark.parametrize("name", [name for name in coded_names() if name != "hierarchical"])
def test_each_rank_encodes_each_element_once(name: str) -> None:
    for world_size in (1, 2, 3, 5, 8):
        program = compressed_program(name, world_size, 11, Options(block_numel=2))
        for instructions in program.ranks:
            encoded = sorted(
                position
                for one in instructions
                if one.op is Op.ENCODE and one.write is not None
                for position in range(one.write.start, one.write.stop)
            )
            assert encoded == list(range(11))


def test_no_dense_value_travels() -> None:
    for name in set(coded_names()) - {"hierarchical"}:
        program = compressed_program(name, 5, 10, Options(block_numel=2))
        sent = [one.read for rank in program.ranks for one in rank if one.op is Op.SEND]
        assert sent
        assert all(program.buffer(read.buffer).encoded for read in sent if read is not None)


def test_inside_a_node_data_travel_dense_and_between_nodes_encoded() -> None:
    program = compressed_program("hierarchical", 6, 4, Options(block_numel=1, ranks_per_node=2))
    for rank, instructions in enumerate(program.ranks):
        for one in instructions:
            if one.op is Op.SEND and one.read is not None and one.peer is not None:
                assert program.buffer(one.read.buffer).encoded == (rank // 2 != one.peer // 2)


def test_every_all_reduce_but_the_engines_own_has_a_compressed_form() -> None:
    carried = {name for operation, name in dense_calls() if operation == "all_reduce"}
    assert set(coded_names()) == carried - {"native"} | {"all_gather"}


def test_the_example_of_the_page_comes_true() -> None:
    proof = require_proof(RING)
    found = [(one.step, one.source, one.target, one.write.buffer) for one in proof.carried if one.elements[0] == 0]
    assert found == [(1, 0, 1, "in0"), (2, 1, 2, "in0"), (3, 2, 0, "final"), (4, 0, 1, "final")]


def kinds(program) -> set[Kind]:
    return {finding.kind for finding in verify(program).findings}


def test_an_owner_that_keeps_its_sum_dense_ends_with_other_bits() -> None:
    finals = find(RING, 0, Op.DECODE)
    assert kinds(drop(RING, 0, finals)) == {Kind.DIFFERENT_SUMS}


def test_an_encoding_that_goes_nowhere_takes_its_values_out_of_the_sum() -> None:
    index = find(RING, 0, Op.ENCODE)
    finding = verify(duplicate(RING, 0, index)).findings[0]
    assert finding.kind is Kind.LOST
    assert "its output for data[0:1] is not in the result, and the residual has only the rest" in str(finding)


def test_a_payload_that_is_added_twice_is_a_doubled_contribution() -> None:
    assert Kind.DOUBLED in kinds(duplicate(RING, 1, find(RING, 1, Op.MERGE)))


def test_a_sum_that_is_sent_dense_though_its_residual_was_kept_is_kept_twice() -> None:
    """Rank 0 encodes its part for the residual's sake, but sends the part itself."""
    exchange = build("all_reduce", "spanning_tree", 2, 4)
    coded = replace(exchange, buffers=(*exchange.buffers, Buffer("code", 4, encoded=True)))
    extra = Instruction(Op.ENCODE, Slice("code", 0, 4), Slice(DATA, 0, 4))
    ranks = (coded.ranks[0], (extra, *(one._replace(after=_moved(one.after)) for one in coded.ranks[1])))
    assert kinds(replace(coded, ranks=ranks)) == {Kind.LOST}


def _moved(after: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *(index + 1 for index in after))


def test_two_ranks_that_encode_the_same_sum_end_with_other_bits() -> None:
    """A result that rank 1 encodes anew before it hands it on: its codec may round otherwise."""
    program = compressed_program("spanning_tree", 4, 2, Options())
    rank, index = next(
        (rank, index)
        for rank, own in enumerate(program.ranks)
        for index, one in enumerate(own)
        if rank and one.op is Op.SEND and one.read is not None and one.read.buffer == "final"
    )
    everything = tuple(range(index))
    own = list(program.ranks[rank])
    again = Instruction(Op.DECODE, Slice(DATA, 0, 2), Slice("final", 0, 2), None, everything)
    anew = Instruction(Op.ENCODE, Slice("final", 0, 2), Slice(DATA, 0, 2), None, (*everything, index))
    moved = [
        one._replace(after=(*(n if n < index else n + 2 for n in one.after), index, index + 1)) for one in own[index:]
    ]
    ranks = [*program.ranks]
    ranks[rank] = (*own[:index], again, anew, *moved)
    assert Kind.DIFFERENT_SUMS in kinds(replace(program, ranks=tuple(ranks)))


def test_a_block_encoded_in_anothers_place_is_a_wrong_element() -> None:
    index = find(RING, 0, Op.ENCODE)
    read = RING.ranks[0][index].read
    moved = change(RING, 0, index, write=Slice("out", 1, 2), read=read)
    moved = change(moved, 0, index + 1, read=Slice("out", 1, 2))
    assert Kind.WRONG_ELEMENT in kinds(moved)


def test_a_bucket_of_many_tensors_with_empty_batches_is_built_at_the_cost_of_its_instructions() -> None:
    tensors = [70_001 * place * place // 1600 for place in range(40)]
    part, batches = build_coded_part("parameter_server", 1, 8, [*tensors, 70_001], Options(block_numel=4096))
    assert sum(batches.sizes) == 70_001
    assert len(part.instructions) == 128  # was never reached: waits of dropped instructions doubled with each of them
