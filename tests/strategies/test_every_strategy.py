"""Every strategy in the registry is proved for every world size up to 33 and several sizes."""

import pytest

from every_call import dense_calls, sparse_calls
from penstock.errors import StrategyError
from penstock.program import Collective
from penstock.strategies import Options, build, build_part, names
from penstock.verify import require_proof

ROOTED = ("broadcast", "reduce")
EVERY = [*dense_calls(), *sparse_calls()]


@pytest.mark.parametrize(("operation", "name"), EVERY)
def test_it_is_proved_for_all_world_sizes_to_17_and_two_beyond(operation: str, name: str) -> None:
    assert all(proved(operation, name, world_size) for world_size in (*range(1, 18), 32, 33))


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "name"), EVERY)
def test_it_is_proved_for_all_world_sizes_to_33(operation: str, name: str) -> None:
    assert all(proved(operation, name, world_size) for world_size in range(18, 32))


def proved(operation: str, name: str, world_size: int) -> bool:
    """Return whether programs of several sizes and roots are proved; `require_proof` says why one is not."""
    roots = {0, world_size // 2, world_size - 1} if operation in ROOTED else {0}
    sizes = ((0, None), (1, None), (world_size - 1, None), (world_size + 2, None), (41, 2))
    choices = [(numel, Options(block_numel=block, root=root)) for root in roots for numel, block in sizes]
    return all(require_proof(build(operation, name, world_size, *choice)).proved for choice in choices)


@pytest.mark.parametrize(("operation", "name"), EVERY)
def test_the_program_says_what_it_is(operation: str, name: str) -> None:
    program = build(operation, name, 5, 12)
    assert (program.strategy, program.collective) == (name, Collective(operation))
    assert (program.world_size, program.numel, len(program.ranks)) == (5, 12, 5)


@pytest.mark.parametrize(("operation", "name"), EVERY)
def test_one_rank_and_no_elements_send_nothing(operation: str, name: str) -> None:
    for program in (build(operation, name, 1, 7), build(operation, name, 4, 0)):
        assert all(one.peer is None for rank in program.ranks for one in rank)


def test_a_hyphen_may_stand_for_an_underscore() -> None:
    assert build("all-reduce", "linear-pipeline", 3, 6) == build("all_reduce", "linear_pipeline", 3, 6)
    assert build(Collective.REDUCE, "spanning-tree", 3, 6) == build("reduce", "spanning_tree", 3, 6)


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StrategyError, match=r"no strategy 'rung' for all_reduce; known: ring, linear_pipeline, .*nat"):
        build("all_reduce", "rung", 4, 8)


def test_an_unknown_operation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StrategyError, match="no operation 'all_to_all'; known: all_reduce, reduce, broadcast"):
        build("all_to_all", "ring", 4, 8)


def test_bad_numbers_are_refused_by_name() -> None:
    with pytest.raises(StrategyError, match="ring: world size 0; wanted >= 1"):
        build("all_reduce", "ring", 0, 8)
    with pytest.raises(StrategyError, match=r"spanning_tree: root 4; wanted 0\.\.3"):
        build("reduce", "spanning_tree", 4, 8, Options(root=4))
    with pytest.raises(StrategyError, match="block_numel is 0; wanted >= 1"):
        Options(block_numel=0)


def test_names_lists_what_an_operation_has() -> None:
    assert names("all_gather") == tuple(name for operation, name in dense_calls() if operation == "all_gather")


@pytest.mark.parametrize("name", list(names("all_reduce")))
def test_a_part_of_a_large_job_is_the_size_of_that_part_alone(name):
    """Of 2,048 ranks a ring's rank has about 5 instructions for each other one; all of them have 20 million."""
    part = build_part("all_reduce", name, 1000, 2048, 25_000_000)
    assert len(part.instructions) <= 5 * 2048
    assert len(part.buffers) <= 3


@pytest.mark.parametrize(("operation", "name"), EVERY)
def test_a_program_is_all_parts(operation, name):
    program = build(operation, name, 7, 50, Options(block_numel=4, root=0))
    parts = [build_part(operation, name, rank, 7, 50, Options(block_numel=4, root=0)) for rank in range(7)]
    assert program.ranks == tuple(part.instructions for part in parts)
    assert all({each.name for each in part.buffers} <= {each.name for each in program.buffers} for part in parts)
