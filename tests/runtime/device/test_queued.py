"""Compressed programs that the host only queues: ranks are processes over gloo, host memory is the device."""

import gc
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():  # the workers have kernels interpreted, which all that start later would inherit
    pytest.skip("host memory is the device here", allow_module_level=True)
pytest.importorskip("triton", reason="install penstock[gpu] to test codecs on a device")

from penstock.codecs.registry import make_codec  # noqa: E402
from penstock.errors import StrategyError  # noqa: E402
from penstock.program import Op  # noqa: E402
from penstock.runtime.device.messages import GroupedMessages  # noqa: E402
from penstock.runtime.device.queued import Bindings, prepare_queued, steps_of_all  # noqa: E402
from penstock.runtime.device.rounds import widen  # noqa: E402
from penstock.strategies import Options, build, build_compressed, coded_names  # noqa: E402
from penstock.verify import require_proof  # noqa: E402
from runtime.queued_workers import (  # noqa: E402
    DEVICE,
    HOST,
    NUMEL,
    PARTS,
    QUEUED,
    every_route,
    gradients,
    several_buckets,
    spoil_one_rank,
)
from spawn import spawn  # noqa: E402

BOUNDS = [0, 5000, 5010, 90_000]


def program_of(strategy, world_size):
    options = Options(block_numel=BOUNDS[-1], ranks_per_node=2)
    return widen(build_compressed(strategy, world_size, BOUNDS, options)[0])


@pytest.mark.parametrize("strategy", coded_names())
def test_what_is_queued_is_proved_too(strategy):
    for world_size in (1, 2, 3, 4, 7, 8):
        assert require_proof(program_of(strategy, world_size)).proved


@pytest.mark.parametrize(
    ("strategy", "groups"), [("parameter_server", 2), ("all_gather", 1), ("ring", 6), ("hierarchical", 4)]
)
def test_four_ranks_start_so_many_groups_of_messages(strategy, groups):
    program = program_of(strategy, 4)
    assert [step.op for step in steps_of_all(program)[0]].count(Op.SEND) == groups


def test_every_instruction_is_queued_once_behind_those_it_waits_for():
    for strategy in coded_names():
        for world_size in (2, 5):
            program = program_of(strategy, world_size)
            for rank, instructions in enumerate(program.ranks):
                order = [set(step.indices) for step in steps_of_all(program)[rank]]
                assert sorted(index for step in order for index in step) == list(range(len(instructions)))
                when = {index: place for place, step in enumerate(order) for index in step}
                for index, one in enumerate(instructions):
                    assert all(when[earlier] < when[index] for earlier in one.after)


def test_a_parameter_server_encodes_and_decodes_everything_in_four_steps():
    program = program_of("parameter_server", 2)
    assert [step.op.value for step in steps_of_all(program)[1]] == [
        "encode", "send", "merge", "encode", "send", "decode",
    ]  # fmt: skip


def test_the_engines_own_collective_is_refused():
    program = build("all_reduce", "native", 2, NUMEL)
    with pytest.raises(StrategyError, match="on the device; send it over gloo or MPI"):
        prepare_queued(program, 0, make_codec("onebit"), None, None, None)


def check_bits(world_size, cases, routes=(HOST, QUEUED)):
    found = spawn(world_size, every_route, cases, routes)
    for number, case in enumerate(cases):
        for first, *others in (one[number] for one in found):
            for route, other in zip(routes[1:], others, strict=True):
                assert other == first, (case, route)
        for step in range(2):
            assert len({one[number][1][step] for one in found}) == 1, case
        assert len(found[0][number][1][0]) == 4 * NUMEL


def test_what_is_queued_has_the_bits_of_the_route_through_the_host():
    check_bits(2, [("onebit", "parameter_server")])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
def test_every_strategy_queued_has_the_bits_of_the_route_through_the_host(world_size):
    check_bits(
        world_size,
        [("terngrad", "ring"), ("bf16", "all_gather"), ("onebit", "hierarchical"), ("fp8", "parameter_server"),
         ("onebit", "halving_doubling"), ("onebit(block=256)", "ring"), ("blocks(bits=2)", "all_gather"),
         ("blocks(bits=8)", "hierarchical"), ("blocks(bits=4)", "parameter_server")],
    )  # fmt: skip


def test_the_second_round_of_a_bucket_goes_with_the_first_of_the_next():
    """terngrad draws random numbers: those of a bucket must not depend on the buckets between its rounds."""
    for alone, together in zip(
        spawn(2, several_buckets, "terngrad", "parameter_server", False),
        spawn(2, several_buckets, "terngrad", "parameter_server", True),
        strict=True,
    ):
        assert together[0] == alone[0]
        assert together[1] == alone[1] == [0, 1, 2, 3] * 2
        assert (alone[2], together[2]) == (2 * 4 * 2, 2 * (4 + 1))
        assert together[3] == alone[3]


@pytest.mark.slow
def test_buckets_that_come_in_another_order_do_not_write_over_one_another():
    """Buckets take the rooms of a ring in turn; then two of one room come one after the other."""
    orders = [range(4), (2, 0, 3, 1)]
    for alone, together in zip(
        *(spawn(3, several_buckets, "onebit", "ring", together, 4, orders) for together in (False, True)), strict=True
    ):
        assert together[0] == alone[0]
        assert together[1] == alone[1] == [*orders[0], *orders[1]]


@pytest.mark.parametrize(
    ("strategy", "world_size", "rooms"),
    [("parameter_server", 4, 1), ("all_gather", 4, 1), ("ring", 2, 1), ("ring", 3, 2), ("ring", 4, 3)],
)
def test_payloads_of_a_bucket_are_written_over_once_nothing_of_it_is_left_to_send_or_decode(
    strategy, world_size, rooms
):
    """By hand, on p ranks: a ring's sum is finished for round p and, with the others, decoded after round 2 p - 2."""
    program, batches = build_compressed(strategy, world_size, [0, 1000], Options(block_numel=1000))
    codec = make_codec("onebit", defers_nonfinite_check=True)
    ready = prepare_queued(program, 0, codec, codec.on_device(DEVICE), batches, GroupedMessages(None))
    assert ready.rooms == rooms


def buckets_of(sizes):
    """Return prepared programs and their buckets; nothing is started."""
    codec, kept = make_codec("onebit", defers_nonfinite_check=True), []
    messages, form = GroupedMessages(SimpleNamespace(send=None, recv=None)), codec.on_device(DEVICE)
    for numel in sizes:
        program, batches = build_compressed("parameter_server", 4, [0, numel], Options(block_numel=numel))
        ready = prepare_queued(program, 0, codec, form, batches, messages)
        kept.append((ready, torch.zeros(numel)))
    return kept


def test_buckets_share_a_room_as_large_as_the_largest_needs():
    """Those that came before a larger one are bound again, so that no smaller memory is left."""
    kept = buckets_of((8000, 16_000, 72_000, 24_000))
    for _ in range(2):
        bound = [ready._bind(data, None) for ready, data in kept]
    assert [each.room.name for each in bound] == [(1, 0)] * 4
    assert {each._memory.data_ptr() for each in bound} == {bound[0].room.memory.data_ptr()}
    (largest, _) = kept[2]
    in_room = [stop - start for (_, name), (start, stop) in largest.regions.items() if name not in largest._lent]
    assert len(bound[0]._memory) == sum(in_room)


def test_a_room_is_no_larger_than_the_buckets_that_still_come():
    """torch's first buckets, or those of a plan that lost a race, may have been larger than all of the plan."""
    kept = buckets_of((8000, 24_000, 72_000))
    for ready, data in kept * 2:
        ready._bind(data, None)
    before = kept[0][0]._bind(kept[0][1], None)._memory.nbytes
    for ready, data in kept[:2] * 4:
        ready._bind(data, None)
    bound = [ready._bind(data, None) for ready, data in kept[:2]]
    assert {each._memory.data_ptr() for each in bound} == {bound[0].room.memory.data_ptr()}
    assert len(bound[0]._memory) == sum(bound[1].needed.values()) < before / 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "hierarchical", "halving_doubling", "all_gather"])
def test_rounds_of_several_buckets_are_sent_together_whatever_the_strategy(strategy):
    """A hierarchy's leaders have rounds in which the others have nothing to do."""
    alone, together = (spawn(4, several_buckets, "onebit", strategy, together) for together in (False, True))
    for one, other in zip(alone, together, strict=True):
        assert (other[0], other[1], other[3]) == (one[0], one[1], one[3])
        assert (other[2] < one[2]) == (strategy != "all_gather")  # which has one round


def test_a_gradient_that_is_not_finite_is_nan_on_every_rank_and_heard_of_when_the_bucket_comes_again():
    for heard, spoilt in spawn(2, spoil_one_rank, "onebit", "parameter_server"):
        assert heard == [2]
        assert spoilt == [[True, True, True], [False, True, True]]  # its piece alone, and in that call alone


def one_rank():
    """Return the program of a rank that has no other, and a bucket with its residual."""
    codec = make_codec("onebit", defers_nonfinite_check=True)
    program, batches = build_compressed("parameter_server", 1, PARTS, Options(block_numel=NUMEL))
    ready = prepare_queued(program, 0, codec, codec.on_device(DEVICE), batches, GroupedMessages(None))
    return ready, gradients(0, 0), torch.zeros(NUMEL)


def test_a_rank_that_has_no_other_is_through_at_once():
    ready, data, residual = one_rank()
    wanted, through = data.clone(), []
    ready.run(data, residual=residual)
    ready.messages.behind(lambda: through.append(True))
    assert (through, ready.messages.sent_nbytes) == ([True], 0)
    torch.testing.assert_close(data + residual, wanted, rtol=0, atol=1e-6)  # nothing is lost
    assert len(data[300:4800].unique()) == 2  # one bit of each


def test_what_is_let_go_gives_its_memory_back_at_once():
    ready, data, residual = one_rank()
    ready.run(data, residual=residual)
    (bound, _) = ready.messages.bindings._bound.popitem()[1]
    gone, _ = weakref.ref(bound), gc.disable()
    try:
        del bound
        assert gone() is None, "only the cycle collector would find it, and it holds a bucket and its residual"
    finally:
        gc.enable()


class Settled:
    """Something bound that notes when it is let go."""

    def __init__(self, name, gone):
        self.name, self.gone, self.is_outgrown = name, gone, False

    def settle(self):
        self.gone.append(self.name)


def test_what_is_bound_to_buckets_that_come_no_more_is_let_go_and_nothing_else():
    bindings, gone, made = Bindings(), [], []

    def use(name):
        bindings.use(name, lambda: made.append(name) or Settled(name, gone))

    for name in "abc" * 3:  # torch's first buckets
        use(name)
    assert (gone, made) == ([], list("abc"))
    for name in "vwxyz" * 2:  # those it makes anew
        use(name)
    assert sorted(gone) == list("abc")
    for name in "vwxyz" * 9:
        use(name)
    assert (len(bindings), made) == (5, list("abcvwxyz"))
