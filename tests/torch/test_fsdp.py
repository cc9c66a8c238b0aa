"""Sharded training: bits of torch's own HSDP where nothing is compressed, nothing lost where something is."""

from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")
from torch.distributed.fsdp import FSDPModule

import torch_fsdp as fsdp
import torch_fsdp_failures as failures
import torch_fsdp_host as host
import torch_fsdp_state as state
from spawn import spawn, spawn_outcomes

QUICK = (
    "50 steps in bf16 with accumulation",
    "one message for all",
    "gradients in one bucket, kept after a step",
    "accumulation with messages",
    "layers without gradients",
    "an optimizer that steps in backward",
    "a layer that is unfrozen",
    "half of a layer that is unfrozen",
)  # of the cases that torch's own is compared with; all of them take a minute
QUICKLY = ("padded shards", "accumulation with messages", "all of it")  # of those with a codec
CODECS = ("blocks(bits=4)", "onebit", "bf16")
CAN_GO_ON = hasattr(FSDPModule, "reset_iter_state")  # after a pass that failed
GO_ON = [failures.fails_midway, failures.fails_while_adding_up]
RING = {"codec": "blocks(bits=4)", **fsdp.quick(strategy="ring")}


@pytest.fixture(scope="module")
def two_by_two():
    """Some cases on two hosts of two ranks, in one set of processes."""
    return spawn(4, fsdp.every_case, (2, 2), {name: fsdp.CASES[name] for name in QUICK})


@pytest.fixture(scope="module")
def pair():
    """What two ranks do, in one set of processes."""
    calls = [host.exchanged_in_host, host.sent_in_fewer_bits, host.trained_in_fewer_bits, fsdp.profiled]
    calls += [state.taken_over_from_wrapped_layers, *GO_ON * CAN_GO_ON]
    return spawn(2, fsdp.each_of, calls)


@pytest.mark.parametrize("case", QUICK)
def test_uncompressed_training_has_the_bits_of_torch_s_own_hsdp(two_by_two, case):
    assert [found[case] for found in two_by_two] == [""] * 4


@pytest.mark.slow
def test_every_other_uncompressed_training_has_them_too():
    others = {name: case for name, case in fsdp.CASES.items() if name not in QUICK}
    for found in spawn(4, fsdp.every_case, (2, 2), others):
        assert found == dict.fromkeys(others, "")


@pytest.mark.parametrize("shape", [(3, 1), (1, 3)], ids=["3x1", "1x3"])
def test_three_replicas_or_shards_have_the_bits_of_torch_s_own_hsdp(shape):
    for found in spawn(3, fsdp.every_case, shape, fsdp.THREE):
        assert found == dict.fromkeys(fsdp.THREE, "")


@pytest.fixture(scope="module", params=[(2, 2), (3, 1)], ids=["2x2", "3x1"])
def coded(request):
    """Gradients through a codec beside torch's own, some cases of training in one set of processes."""
    ranks = request.param[0] * request.param[1]
    return spawn(ranks, fsdp.conserved, request.param, "blocks(bits=4)", {name: fsdp.CODED[name] for name in QUICKLY})


@pytest.mark.parametrize("case", QUICKLY)
def test_what_is_applied_and_what_is_owed_are_the_gradients_by_element(coded, case):
    check_nothing_is_lost(coded, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "shape"), [("blocks(bits=4)", (2, 2)), ("blocks(bits=4)", (3, 1)), ("onebit", (3, 1)), ("bf16", (2, 2))]
)
def test_nothing_is_lost_by_other_codecs_and_in_other_cases(codec, shape):
    ranks = spawn(shape[0] * shape[1], fsdp.conserved, shape, codec, fsdp.CODED)
    for case in fsdp.CODED:
        check_nothing_is_lost(ranks, case, is_coarse=codec == "blocks(bits=4)")


def check_nothing_is_lost(ranks, case, is_coarse=True):
    for found in (rank[case] for rank in ranks):
        assert found.wrong(in_16_bits="sums in bf16" in case, is_coarse=is_coarse) == ""
        assert fsdp.same(found.weights, ranks[0][case].weights)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(2, 2), (3, 1)])
def test_ranks_have_the_same_weights_with_any_codec(codec, shape):
    ranks = spawn(shape[0] * shape[1], fsdp.alike, shape, {"codec": codec, **fsdp.quick(workers=shape[0])})
    for losses, weights, said in ranks:
        assert fsdp.same(weights, ranks[0][1])
        assert losses[-1] < 2.0
        assert f"+{codec}" in said
        assert "predicted network" in said
        assert "measured network" in said


def test_a_codec_is_measured_planned_and_explained():
    """Nothing is given: the ranks profile, measure between replicas, plan and follow."""
    options = {"codec": "blocks(bits=4)", "profile_iterations": 2, "measure_seconds": 0.3, "measurements": False}
    ranks = spawn(4, fsdp.alike, (2, 2), options)
    assert len({said.splitlines()[0] for _, _, said in ranks}) == 1
    for _, weights, said in ranks:
        assert said.startswith("plan ")
        assert "by all_gather+blocks(bits=4) on 2 workers" in said
        assert fsdp.same(weights, ranks[0][1])


@pytest.mark.parametrize(
    "shape", [(4, 1), pytest.param((1, 4), marks=pytest.mark.slow), pytest.param((2, 2), marks=pytest.mark.slow),
              pytest.param((3, 1), marks=pytest.mark.slow), pytest.param((1, 2), marks=pytest.mark.slow)]
)  # fmt: skip
def test_weights_moments_and_what_replicas_owe_are_taken_over_on_another_mesh_by_element(tmp_path, shape):
    folder = str(tmp_path / "checkpoint")
    before = spawn(4, state.save_state, (2, 2), folder, RING)[0]
    after = spawn(shape[0] * shape[1], state.load_state, shape, folder, {"codec": "blocks(bits=4)"})
    assert {key[0] for key in before} == {"weight", *MOMENTS, "residual", "iterations", "later"}
    check_taken_over(before, after, shape[0])
    for found in after:
        assert fsdp.same(found["later", "weights"], after[0]["later", "weights"])


MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def check_taken_over(before, after, replicas):
    """All state is as it was; where there are other replicas, what they owe together is."""
    owed = [key for key in before if key[0] in ("residual", "velocity")]
    for kind in {key[0] for key in owed}:
        assert any(np.abs(before[key]).max() > 0 for key in owed if key[0] == kind)
    for found in after:
        assert found.keys() == before.keys()
        for key in before.keys() - set(owed):
            if key[0] != "later":
                np.testing.assert_array_equal(found[key], before[key], err_msg=str(key))
        for key in owed:
            assert found[key].shape[0] == replicas
            np.testing.assert_allclose(found[key].sum(0), before[key].sum(0), rtol=1e-6, atol=1e-9)
            if replicas >= 2:
                np.testing.assert_array_equal(found[key][:2], before[key])


def test_what_is_owed_is_named_as_weights_are_whatever_layers_are_wrapped_in(pair):
    for found in (each["taken_over_from_wrapped_layers"] for each in pair):
        assert found == {"named as weights are": True, "the same": True}


@pytest.mark.slow
def test_velocities_of_a_sparse_codec_are_taken_over_too(tmp_path):
    folder, options = str(tmp_path / "checkpoint"), {"codec": "gtopk", "density": 0.2, "momentum": 0.5}
    before = spawn(4, state.save_state, (2, 2), folder, options | {"profile_iterations": 2, "measure_seconds": 0.3})[0]
    assert {key[0] for key in before} >= {"residual", "velocity"}
    check_taken_over(before, spawn(2, state.load_state, (2, 1), folder, options), 2)


def resumed(folder, make):
    """What is there where a run was saved and in the end, and the same where it is resumed on its mesh by its plan."""
    before = spawn(4, state.save_state, (2, 2), folder, RING, make)[0]
    options = {"codec": "blocks(bits=4)", "plan": f"{folder}.plan"}
    return before, spawn(4, state.load_state, (2, 2), folder, options, make)


def test_a_run_that_is_resumed_on_its_mesh_goes_on_to_the_bit(tmp_path):
    before, after = resumed(str(tmp_path / "checkpoint"), fsdp.adamw)
    for found in after:
        assert fsdp.same(found["later", "weights"], before["later", "weights"])


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [6, 9], ids=["after the warm-up", "at its end"])  # saved after 8 steps
def test_compressed_adamw_is_resumed_with_its_moments(tmp_path, warmup):
    before, after = resumed(str(tmp_path / "checkpoint"), partial(state.compressed_adamw, warmup_steps=warmup))
    kept = {key: value for key, value in before.items() if key[0] not in ("is_frozen", "mean_square")}
    for found in after:
        check_taken_over(kept, [{key: found[key] for key in kept}], 2)
        for one, other in zip(found["later", "squares"], before["later", "squares"], strict=True):
            assert 0.5 < one.mean() / other.mean() < 2.0  # a fifth, if four of five steps were forgotten
        for one, other in zip(found["later", "weights"], before["later", "weights"], strict=True):
            assert np.abs(one - other).mean() < (1e-3 if warmup < 8 else 1e-2)  # four steps move by 0.04


@pytest.mark.slow
def test_moments_of_compressed_adamw_are_taken_over_on_another_mesh(tmp_path):
    folder, make = str(tmp_path / "checkpoint"), partial(state.compressed_adamw, warmup_steps=6)
    before = spawn(4, state.save_state, (2, 2), folder, RING, make)[0]
    kept = {key: value for key, value in before.items() if key[0] != "is_frozen"}
    for found in spawn(4, state.load_state, (4, 1), folder, {"codec": "blocks(bits=4)"}, make):
        check_taken_over(kept, [{key: found[key] for key in kept}], 4)


MESSAGES = {
    "one dimension": "mesh has 1 dimension, (2,); wanted two, replicas by shards: init_device_mesh",
    "no mesh": "mesh is None; wanted a DeviceMesh of two dimensions",
    "no names": "mesh has no names for its dimensions",
    "other options": "codec is 'terngrad' on rank 0 and 'onebit' on rank 3; give all ranks the same",
    "other models": "on rank 2; give all ranks the same model",
    "other reshard": "reshard_after_forward is False on rank 0 and True on rank 1",
    "unknown": "fully_shard_with() got an unexpected keyword argument 'bucket_cap_mb'",
    "clip": "a rank knows the norm of its own part only; use torch.nn.utils.clip_grad_norm_",
    "twice": "the module was given to fully_shard_with before",
    "sharded on the whole mesh": "module 'blocks.0' was sharded on the whole mesh, so torch averages its replicas",
    "a hook": "module '(root)' has an all-reduce hook already",
    "a name": "the module has an attribute 'plan' of its own",
    "other names": "mesh_dim_names is ('replicate', 'shard') on rank 0 and ('host', 'gpu') on rank 3",
    "layers": "layers is 3; wanted a class of modules",
    "a sparse shard codec": "shard_codec is 'topk', without payloads of one size; wanted one such as 'blocks(bits=8)'",
    "a shard codec in bf16": "shard_codec with messages of torch.bfloat16 (first: 'table.weight') on cpu; wanted float",
    "a shard codec of a bf16 model": "messages of torch.bfloat16 (first: 'table.weight') on cpu; wanted float32",
    "a shard codec of layers sharded in bf16": "messages of torch.bfloat16 (first: 'blocks.0.scale') on cpu; wanted",
    "entries of the model": "select='model' with shards: a rank knows the entries of its own part only; wanted",
    "other shard codecs": "shard_codec is 'blocks(bits=8)' on rank 0 and 'blocks(bits=4)' on rank 3",
    "another mesh beside": "parameter 'table.weight' lies on a mesh of its own, ('tp',) of ranks",
    "offloaded momentum": "CompressedAdamW with CPU offload: its moments are in host memory",
    "nan": "holds NaN or infinity on some rank",
    "nan in one shard": "holds NaN or infinity",
    "nan in one shard, stepped in backward": "holds NaN or infinity",
    "steps before averages": "replicas do not average them, by set_requires_all_reduce(False); use set_requires",
    "foreign state": "on rank 1, sharded exchange state: nothing: found 'no such parameter'",
}
NAN = ("nan", "nan in one shard", "nan in one shard, stepped in backward")
ALONE = (*NAN, "foreign state")  # they spoil the ranks for others, or train


@pytest.fixture(scope="module")
def refusals():
    """What is raised on each rank, all cases in one set of processes."""
    return spawn(4, failures.every_refusal, [name for name in MESSAGES if name not in ALONE])


@pytest.mark.parametrize("wrong", [name for name in MESSAGES if name not in ALONE])
def test_what_is_wrong_is_said_on_every_rank(refusals, wrong):
    for found in refusals:
        assert MESSAGES[wrong] in found[wrong]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ALONE)
def test_what_goes_wrong_later_is_said_on_every_rank_too(wrong):
    for each in spawn_outcomes(4, failures.refused, wrong):
        assert MESSAGES[wrong] in str(each.value)


@pytest.mark.parametrize("codec", [None, "blocks(bits=4)"])
def test_a_step_is_skipped_by_all_ranks_where_one_shard_of_one_rank_has_nan(codec):
    ranks = spawn(4, failures.scaled, codec)
    for found in ranks:
        assert found.scales == [1024.0] * 5 + [512.0] * 3
        assert fsdp.same(found.weights[5], found.weights[4])
        assert not any(map(np.array_equal, found.weights[7], found.weights[5]))
        assert all(np.isfinite(each).all() for each in found.weights[7])
        for now, before in zip(found.weights, ranks[0].weights, strict=True):
            assert fsdp.same(now, before)
        assert bool(found.owed[5]) == (codec is not None)
        assert fsdp.same(found.owed[5], found.owed[4])
        assert codec is None or any(each.any() for each in found.owed[5])


@pytest.mark.slow
def test_a_rank_that_dies_is_noticed_by_all_others():
    found = [each.value for each in spawn_outcomes(4, failures.survive, 3)]
    assert found[3] is None
    assert "TransportError" in found[1]  # its replica
    assert "rank" in found[1]
    assert all(each != "nothing" for each in found[:3])


@pytest.mark.skipif(not CAN_GO_ON, reason="this torch cannot go on after such a pass")
def test_a_pass_that_failed_leaves_nothing_in_the_gradients_of_the_next(pair):
    assert [each["fails_midway"] for each in pair] == [True, True]


@pytest.mark.skipif(not CAN_GO_ON, reason="this torch cannot go on after such a pass")
def test_what_was_added_up_before_a_failure_is_given_up_as_in_torch_s_own(pair):
    assert [each["fails_while_adding_up"] for each in pair] == [True, True]


def test_ranks_of_a_host_gather_and_sum_what_torch_s_own_calls_do(pair):
    check_exchanged(each["exchanged_in_host"] for each in pair)


def test_shards_between_hosts_travel_in_a_quarter_of_the_bytes_and_are_rounded_alike(pair):
    for found in (each["sent_in_fewer_bits"] for each in pair):
        assert found["share of bytes"] < 0.27
        assert 0 < found["gathered off"] < 0.01  # of the largest
        assert 0 < found["summed off"] < 0.01
        assert found["gathered"] == pair[0]["sent_in_fewer_bits"]["gathered"]
    assert [each["sent_in_fewer_bits"]["nan arrives"] for each in pair] == [True, False]  # where it was sent to


def test_training_with_shards_in_fewer_bits_has_losses_close_to_torch_s_own(pair):
    for plain, coded in (each["trained_in_fewer_bits"] for each in pair):
        assert plain != coded
        assert coded == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "codec"), [((1, 2), None), ((2, 2), "blocks(bits=4)")], ids=["by itself", "beside a codec of replicas"]
)
def test_behind_a_shard_codec_nothing_is_lost_but_its_own_rounding(shape, codec):
    ranks = spawn(shape[0] * shape[1], host.behind_a_shard_codec, shape, codec)
    for found in ranks:
        assert found.off < 1e-6
        assert (found.owed > 1e-4) == (codec is not None)
        assert 1e-5 < found.rounded < 0.01 * found.largest
        assert fsdp.same(found.weights, ranks[0].weights)
        assert found.losses[-1] < found.losses[0]


@pytest.mark.slow
def test_so_do_three_ranks_up_to_the_order_of_sums():
    check_exchanged(spawn(3, host.exchanged_in_host))


def check_exchanged(ranks):
    for found in ranks:
        assert found == dict.fromkeys(found, True)
        assert len(found) == 6


@pytest.mark.slow
def test_momentum_is_exchanged_by_compressed_adamw():
    ranks = spawn(4, fsdp.by_momentum, (2, 2))
    for plain, coded, weights, frozen in ranks:
        assert fsdp.same(weights, ranks[0][2])
        assert frozen == len(weights)
        assert coded[:8] != coded[-8:]
        assert np.mean(coded[-10:]) < 1.05 * np.mean(plain[-10:])


@pytest.mark.slow
def test_a_mesh_may_be_part_of_a_larger_one():
    first, second, third, fourth = spawn(4, fsdp.part_of_a_mesh)
    assert fsdp.same(first, second)
    assert fsdp.same(third, fourth)
    assert not fsdp.same(first, third)


@pytest.mark.slow
def test_a_plan_is_made_again_where_communication_drifts_and_can_be_given():
    for found in spawn(4, fsdp.planned_again):
        assert found["hashes"][1] == ""
        assert "planning again when communication drifts by 50%: on, 1 times so far" in found["said"]
        assert found["given"]
        assert {"compute", "network"} < set(found["lanes"])
        assert len(found["lanes"]) > 3  # and every instruction
        assert found["routes"][0].endswith(f"by ring+blocks(bits=4), in {len(found['buckets'])} messages")
        assert found["traffic"].sent_nbytes > 0
        assert found["held"] > 0


def test_profiled_passes_compute_alone_but_the_last_which_shows_what_messages_cost_meanwhile(pair):
    for *alone, last, planned in (each["profiled"] for each in pair):
        assert alone == ["essss"] * 3  # three layers and the rest
        assert last.endswith("e")
        assert last.count("s") == 4
        assert planned.count("s") >= 1


@pytest.mark.slow
def test_torch_compile_changes_no_bit():
    assert spawn(4, fsdp.compiled, (2, 2)) == [""] * 4


@pytest.mark.slow
def test_torch_compile_loses_nothing_with_a_codec():
    ranks = spawn(4, fsdp.conserved, (2, 2), "blocks(bits=4)", {"compiled": fsdp.Case(fsdp.EVEN)}, True)
    check_nothing_is_lost(ranks, "compiled")


@pytest.mark.slow
def test_tensor_parallelism_beside_it_changes_no_bit_and_loses_nothing(tmp_path):
    tried = ("bits", "bits by our ring", "nothing lost", "one plan, equal weights", "state", "resumed")
    for found in spawn(4, state.beside_tensor_parallelism, str(tmp_path / "checkpoint")):
        assert found == dict.fromkeys(tried, "")


@pytest.mark.parametrize("codec", [None, "blocks(bits=4)"])
def test_zero_redundancy_optimizer_has_the_bits_of_adamw(zero, codec):
    whole = sum(each.size for each in zero[0][codec][True][1])
    assert zero[0][codec][True][2] + zero[1][codec][True][2] == whole  # moments are there once
    for found in (each[codec] for each in zero):
        (plain, weights, everything), (losses, others, kept) = found[False], found[True]
        assert kept < whole == everything
        assert losses == plain
        assert fsdp.same(others, weights)
        assert fsdp.same(others, zero[0][codec][True][1])
        assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])


@pytest.fixture(scope="module")
def zero():
    """Training by our DDP wrapper with AdamW and with ZeroRedundancyOptimizer, on two ranks."""
    return spawn(2, fsdp.with_zero)
