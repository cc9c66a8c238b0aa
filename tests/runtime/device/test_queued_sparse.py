"""Sparse exchanges that the host only queues: ranks are processes over gloo, host memory is the device."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():  # the workers have kernels interpreted, which all that start later would inherit
    pytest.skip("host memory is the device here", allow_module_level=True)
pytest.importorskip("triton", reason="install penstock[gpu] to test codecs on a device")

from penstock.codecs.registry import make_codec  # noqa: E402
from penstock.errors import StrategyError  # noqa: E402
from penstock.program import Op  # noqa: E402
from penstock.runtime.device.messages import GroupedMessages  # noqa: E402
from penstock.runtime.device.queued import prepare_queued, steps_of_all  # noqa: E402
from penstock.runtime.device.rounds import widen  # noqa: E402
from penstock.strategies import Options, build_compressed, parse_strategy, sparse_names  # noqa: E402
from penstock.verify import require_proof  # noqa: E402
from runtime.queued_workers import several_buckets, spoil_one_rank  # noqa: E402
from runtime.sparse_workers import DEVICE, STEPS, both_routes, compiled_and_launched, gradients  # noqa: E402
from spawn import spawn  # noqa: E402

EVERY = (*sparse_names(), "hierarchical(outer=gtopk)")
GTOPK, HALF = "sparse(density=0.004)", "sparse(density=0.004, value_bits=16)"  # selected by one kernel: it takes less
CASES = [
    (GTOPK, "gtopk", "ties"),
    (HALF, "gtopk", "overflow"),
    (HALF, "gtopk_doubling", "ties"),
    (GTOPK, "gtopk_doubling", "not finite"),
    (HALF, "topk_allgather", "usual"),
    (GTOPK, "topk_allgather", "not finite"),
    (GTOPK, "hierarchical(outer=gtopk_doubling)", "usual"),
]


def program_of(strategy, world_size):
    name, options = parse_strategy(strategy)
    return widen(build_compressed(name, world_size, [0, 5000, 5010, 90_000], Options(ranks_per_node=2, **options))[0])


def slow(*arguments):
    return pytest.param(*arguments, marks=pytest.mark.slow)


@pytest.mark.parametrize(("codec", "selects"), [(HALF, "select_each"), ("sparse(density=0.01)", "write_exactly")])
def test_every_kernel_is_asked_to_be_compiled_before_it_is_launched(codec, selects):
    """With the alignment of its memory and its constants: another variant would be compiled at its first launch."""
    for early, asked in spawn(2, compiled_and_launched, codec, "gtopk_doubling"):
        assert early == []
        assert {"pack", "unite", "digit", "count", "cut", "put", "look_at_firsts", selects} <= set(asked)


@pytest.mark.parametrize("strategy", EVERY)
def test_what_is_queued_is_proved_too(strategy):
    for world_size in (1, 2, 3, 4, 7, 8):
        assert require_proof(program_of(strategy, world_size)).proved


@pytest.mark.parametrize(
    ("strategy", "groups"),
    [("gtopk", 4), ("gtopk_doubling", 2), ("topk_allgather", 1), ("hierarchical(outer=gtopk)", 4)],
)
def test_four_ranks_start_so_many_groups_of_messages(strategy, groups):
    assert [step.op for step in steps_of_all(program_of(strategy, 4))[0]].count(Op.SEND) == groups


def test_every_instruction_is_queued_once_behind_those_it_waits_for():
    for strategy in EVERY:
        for world_size in (2, 5):
            program = program_of(strategy, world_size)
            for instructions, steps in zip(program.ranks, steps_of_all(program), strict=True):
                when = {index: place for place, step in enumerate(steps) for index in step.indices}
                assert (
                    sorted(when) == list(range(sum(len(step.indices) for step in steps))) == [*range(len(instructions))]
                )
                for index, one in enumerate(instructions):
                    assert all(when[earlier] < when[index] for earlier in one.after)


def test_a_codec_whose_payloads_cannot_be_added_is_refused():
    program, batches = build_compressed("gtopk", 2, [0, 100], Options())
    with pytest.raises(StrategyError, match=r"adds encoded blocks, which onebit\(\) cannot; use a sparse codec"):
        prepare_queued(program, 0, make_codec("onebit"), None, batches, None)


@pytest.mark.parametrize(
    ("strategy", "world_size", "rooms"),
    [("gtopk", 1, 1), ("gtopk", 4, 4), ("gtopk_doubling", 4, 2), ("topk_allgather", 4, 1)],
)
def test_blocks_of_a_bucket_are_written_over_once_nothing_of_it_is_left_to_send_or_decode(strategy, world_size, rooms):
    """By hand: a block is written before the first round, merged, and decoded after the last."""
    program, batches = build_compressed(strategy, world_size, [0, 1000], Options())
    codec = make_codec(GTOPK, defers_nonfinite_check=True)
    ready = prepare_queued(program, 0, codec, codec.on_device(DEVICE), batches, GroupedMessages(None))
    assert ready.rooms == rooms


@pytest.mark.parametrize("world_size", [1, 2, slow(3), slow(4), slow(5)])
def test_blocks_merged_on_the_device_have_the_bits_of_those_merged_on_the_host(world_size):
    found = spawn(world_size, both_routes, CASES)
    for number, case in enumerate(CASES):
        for by_host, queued in (one[number] for one in found):
            assert queued == by_host, case
        for step in range(STEPS):
            assert len({one[number][1][step] for one in found}) == 1, case


def test_larger_blocks_do_too():
    """With these, the host would send gaps between indices."""
    for each in spawn(2, both_routes, [("sparse(density=0.05)", "gtopk", "ties")]):
        assert [queued == by_host for by_host, queued in each] == [True]


@pytest.mark.parametrize(("strategy", "world_size"), [("gtopk_doubling", 3), slow("gtopk", 5)])
def test_nothing_is_lost_of_what_merges_drop(strategy, world_size):
    """Gradients are multiples of 1/8, so all sums are exact."""
    found = spawn(world_size, both_routes, [(GTOPK, strategy, "ties")])
    ranks = [[np.frombuffer(each, np.float32) for each in queued] for ((_, queued),) in found]
    applied, owed = sum(ranks[0][:-1]), sum(each[-1] for each in ranks)
    given = sum(gradients(rank, "ties", world_size).sum(0) for rank in range(world_size))
    assert np.array_equal(applied + owed, given.numpy())
    assert owed.any()


@pytest.mark.parametrize(("strategy", "world_size", "groups"), [("gtopk_doubling", 3, 3), slow("gtopk", 4, 3)])
def test_rounds_of_buckets_of_different_sizes_are_sent_together(strategy, world_size, groups):
    """Blocks that are merged again and again must not lie where another bucket's do."""
    alone, together = (spawn(world_size, several_buckets, GTOPK, strategy, together) for together in (False, True))
    for one, other in zip(alone, together, strict=True):
        assert (other[0], other[1], other[3]) == (one[0], one[1], one[3])
    assert (alone[0][2], together[0][2]) == (2 * 4 * groups, 2 * (4 + groups - 1))  # of those rank 0 has a part in


def test_a_gradient_that_is_not_finite_is_nan_on_every_rank_and_heard_of_when_the_bucket_comes_again():
    for heard, spoilt in spawn(2, spoil_one_rank, GTOPK, "gtopk"):
        assert heard == [2]
        assert spoilt == [[True, True, True], [False, True, True]]  # its tensor alone, and in that call alone
