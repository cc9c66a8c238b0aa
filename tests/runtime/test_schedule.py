"""Schedules: order, overlap, bounds, and freedom from circular waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StrategyError
from penstock.program import Collective, Instruction, Op, Program, Slice
from penstock.runtime.schedule import Action, Do, choose_window, schedule, stuck_ranks
from runtime.programs import chain, data, exchange, ring


def words(actions: tuple[Action, ...]) -> str:
    return ", ".join(f"{action.do.value} {action.step}" for action in actions)


def test_the_middle_of_a_chain_posts_receives_before_it_waits() -> None:
    program = chain(3, numel=8, blocks=2)
    assert (
        words(schedule(program.ranks[1], window=2)) == "recv 0, recv 2, wait 0, send 1, wait 2, send 3, wait 1, wait 3"
    )


def test_a_window_of_one_awaits_each_message_before_the_next() -> None:
    program = chain(3, numel=8, blocks=2)
    assert words(schedule(program.ranks[0], window=1)) == "send 0, wait 0, send 1, wait 1"


def test_a_merge_waits_for_what_it_reads_and_for_who_reads_what_it_writes() -> None:
    assert words(schedule(exchange(4).ranks[0], window=4)) == "recv 1, send 0, wait 0, wait 1, compute 2"


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 5), st.booleans())
def test_every_schedule_starts_all_keeps_dependencies_and_stays_in_the_window(
    world_size: int, numel: int, window: int, pipelined: bool
) -> None:
    program = chain(world_size, numel, blocks=5) if pipelined else ring(world_size, numel)
    for instructions in program.ranks:
        flying: dict[Op, set[int]] = {Op.SEND: set(), Op.RECV: set()}
        finished: set[int] = set()
        started: list[int] = []
        for do, index in schedule(instructions, window):
            if do is Do.WAIT:
                flying[instructions[index].op].remove(index)
                finished.add(index)
                continue
            assert set(instructions[index].after) <= finished
            started.append(index)
            if do is Do.COMPUTE:
                finished.add(index)
            else:
                flying[instructions[index].op].add(index)
                assert len(flying[instructions[index].op]) <= window
        assert sorted(started) == list(range(len(instructions))) == sorted(finished)
        peers = {i.peer for i in instructions}
        for op, peer in [(op, peer) for op in flying for peer in peers]:
            order = [i for i in started if instructions[i].op is op and instructions[i].peer == peer]
            assert order == sorted(order)


def circle_in_a_small_window() -> Program:
    """Rank 0 sends twice to rank 1, then to rank 2; rank 1 first wants what rank 2 sends after that."""
    to_one = [Instruction(Op.SEND, None, data(i, i + 1), 1) for i in range(2)]
    rank0 = (*to_one, Instruction(Op.SEND, None, data(2, 3), 2))
    rank1 = (
        Instruction(Op.RECV, data(0, 1), None, 2),
        Instruction(Op.MERGE, data(1, 2), data(0, 1), None, (0,)),
        *(Instruction(Op.RECV, data(i, i + 1), None, 0, (1,)) for i in range(2)),
    )
    rank2 = (Instruction(Op.RECV, data(0, 1), None, 0), Instruction(Op.SEND, None, data(0, 1), 1, (0,)))
    return Program("circle", Collective.BROADCAST, 3, 3, (rank0, rank1, rank2))


def test_a_window_that_would_hang_is_widened() -> None:
    program = circle_in_a_small_window()
    narrow = [schedule(instructions, 1) for instructions in program.ranks]
    assert [rank for rank, _ in stuck_ranks(program, narrow)] == [0, 1, 2]
    assert choose_window(program, 1) == 4  # three sends must be in flight; windows double


def test_a_program_that_waits_in_a_circle_is_refused_by_name() -> None:
    def rank(peer: int) -> tuple[Instruction, ...]:
        return (
            Instruction(Op.RECV, data(0, 1), None, peer),
            Instruction(Op.SEND, None, data(0, 1), peer, (0,)),
        )

    program = Program("polite", Collective.BROADCAST, 2, 1, (rank(1), rank(0)))
    with pytest.raises(StrategyError, match=r"polite: ranks wait in a circle; rank 0 stops at instruction 0: recv"):
        choose_window(program, 4)


def test_native_calls_are_met_by_all_ranks() -> None:
    call = Instruction(Op.NATIVE, Slice("data", 0, 1))
    missing = Program("native", Collective.ALL_REDUCE, 2, 1, ((call,), ()))
    with pytest.raises(StrategyError, match="rank 0 stops at instruction 0"):
        choose_window(missing, 4)
    assert choose_window(Program("native", Collective.ALL_REDUCE, 2, 1, ((call,), (call,))), 4) == 4


def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(StrategyError, match="window of 0 messages; wanted >= 1"):
        choose_window(exchange(1), 0)
