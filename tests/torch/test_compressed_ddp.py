"""Training with codecs: ranks alike to the bit, and nothing lost: applied plus owed is what the gradients were."""

import re

import numpy as np
import pytest
import torch

import torch_compressed as training
import torch_training
from penstock.codecs.registry import codec_name
from penstock.errors import CodecError, FormatError
from penstock.torch import DistributedDataParallel
from python_codecs import Int8
from spawn import spawn, spawn_outcomes
from torch_conserved import EXACT, STEPS, check_conserved, gradients

CASES = {
    "ring": {"codec": EXACT, "strategy": "ring"},
    "parameter server": {"codec": EXACT, "strategy": "parameter_server"},
    "auto": {"codec": EXACT, "network": None},
    "every tensor by itself": {"codec": EXACT, "planner": "wfbp", "bulk": False},
    "bulks": {"codec": EXACT, "planner": "wfbp"},
    "after the backward pass": {"codec": EXACT, "planner": "naive", "bulk": False},
    "static graph": {"codec": EXACT, "static_graph": True, "planner": "wfbp", "bulk": False},
    "static graph, after the backward pass": {"codec": EXACT, "static_graph": True, "planner": "naive", "bulk": False},
    "without bucket views": {"codec": EXACT, "gradient_as_bucket_view": False},
    "gtopk": {"codec": "gtopk", "density": 0.1},
    "gtopk by a tree": {"codec": "gtopk", "density": 0.1, "strategy": "gtopk"},
    "topk": {"codec": "topk", "density": 0.1},
    "the first bucket dense": {"codec": EXACT, "plan": training.half_compressed(EXACT)},
    "gtopk, small tensors dense": {"codec": "gtopk", "density": 0.1, "dense_below": 25},
}
ROUNDED = {  # codecs whose values are rounded, so that sums are right to float32's precision only
    "onebit": {"codec": "onebit"},
    "terngrad": {"codec": "terngrad"},
    "blocks": {"codec": "blocks(bits=4, block=16)"},
    "tbq": {"codec": "tbq", "strategy": "linear_pipeline"},
    "written in Python": {"codec": Int8(), "network": None},
    "low rank": {"codec": "lowrank(rank=1)", "strategy": "ring", "second": (4, 5)},
    "low rank in two rounds": {"codec": "lowrank(rank=1, rounds=2)", "network": None, "second": (4, 5)},
}
MIXED = {planner: training.mixed_options(planner, EXACT) for planner in ("joint", "selective")}


@pytest.fixture(scope="module")
def two_ranks():
    """All cases on two ranks, in one pair of processes."""
    return spawn(2, training.echo, CASES | ROUNDED | MIXED)


@pytest.mark.parametrize("case", MIXED)
def test_a_planner_that_mixes_leaves_one_bucket_dense_and_cuts_the_other_into_eight(two_ranks, case):
    for rank in two_ranks:
        assert rank[case]["plan"] == two_ranks[0][case]["plan"]
    routes = [(bucket.tensors, str(bucket.route)) for bucket in two_ranks[0][case]["plan"].buckets]
    assert routes == [(("second",), "ring"), (("first",), f"ring+{EXACT}/8")]


def test_what_is_owed_is_kept_and_paid_when_plans_change():
    """Compressed, dense, and compressed again, in other buckets and other numbers of pieces."""
    ranks = spawn(2, training.change_plans, EXACT)
    for before, after in zip(*ranks, strict=True):
        np.testing.assert_array_equal(before["applied"], after["applied"])
        total = before["applied"] + before["owed"] + after["owed"]
        np.testing.assert_array_equal(total, gradients(2, before["steps"]))
        assert before["dense"] != bool(before["owed"].any() or after["owed"].any())


@pytest.mark.parametrize("case", [*CASES, *MIXED])
def test_what_is_applied_and_what_is_owed_are_the_gradients_to_the_bit(two_ranks, case):
    check_conserved([rank[case] for rank in two_ranks], gradients(2))


@pytest.mark.parametrize("case", CASES)
def test_every_iteration_is_counted_once(two_ranks, case):
    profiled = 0 if "plan" in CASES[case] else two_ranks[0]["ring"]["iterations"] - STEPS
    assert two_ranks[0][case]["iterations"] == STEPS + profiled


@pytest.mark.parametrize("case", ROUNDED)
def test_codecs_that_round_owe_what_they_rounded(two_ranks, case):
    check_conserved([rank[case] for rank in two_ranks], gradients(2), tolerance=1e-4)


@pytest.mark.parametrize("case", [case for case, options in (CASES | ROUNDED).items() if "plan" not in options])
def test_the_plan_names_the_codec(two_ranks, case):
    plan = two_ranks[0][case]["plan"]
    if plan is None:  # measured on a machine too busy for it: torch's buckets are compressed as they are
        assert "the network could not be measured" in two_ranks[0][case]["explain"]
        assert case == "auto"
        return
    codec = codec_name((CASES | ROUNDED)[case]["codec"])
    wanted = codec if "topk" not in codec or "(" in codec else "sparse(density=0.1)"
    assert {bucket.codec for bucket in plan.buckets} == {wanted}


@pytest.mark.parametrize("world_size", [3, 4])
def test_any_number_of_workers(world_size):
    cases = {"onebit": {"codec": "onebit"}, "exact": {"codec": EXACT}, "gtopk": {"codec": "gtopk", "density": 0.1}}
    ranks = spawn(world_size, training.echo, cases)
    wanted = gradients(world_size)
    check_conserved([rank["onebit"] for rank in ranks], wanted, tolerance=1e-4)
    for case in ("exact", "gtopk"):
        check_conserved([rank[case] for rank in ranks], wanted, tolerance=0.0 if world_size == 4 else 1e-4)


def test_one_worker_compresses_nothing_and_says_so():
    cases = {"onebit": {"codec": "onebit"}, "auto": {"codec": "auto"}, "gtopk": {"codec": "gtopk", "density": 0.1}}
    (rank,) = spawn(1, training.echo, cases)
    for found in rank.values():
        np.testing.assert_array_equal(found["applied"], gradients(1))
        assert found["sent"][0] == 0
        assert "one worker sends nothing" in found["explain"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_gradients_are_compressed_and_ranks_stay_alike(dtype):
    ranks = [rank["case"] for rank in spawn(2, training.echo, {"case": {"codec": "onebit", "dtype": dtype}})]
    np.testing.assert_array_equal(ranks[0]["applied"], ranks[1]["applied"])
    assert ranks[0]["owed"].any()


def test_bytes_are_counted_as_they_travel():
    large = spawn(2, training.compare_traffic)
    for dense, compressed in large:
        assert dense.dense_nbytes == compressed.dense_nbytes
        assert dense.dense_nbytes <= dense.sent_nbytes < dense.dense_nbytes + 4096  # ranks compare programs, once
        assert compressed.sent_nbytes < compressed.dense_nbytes / 4


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Two ranks that stopped, left a checkpoint each, and went on."""
    folder = str(tmp_path_factory.mktemp("states"))
    return folder, spawn(2, training.stop_and_go_on, EXACT, folder)


def test_a_run_that_stops_and_goes_on_ends_as_one_that_did_not(stopped):
    for rank in stopped[1]:
        np.testing.assert_array_equal(rank["whole"], rank["parts"])


def test_names_that_the_model_does_not_have_are_refused_and_a_compiled_models_are_taken(stopped):
    for rank in stopped[1]:
        unknown, compiled, _ = rank["refused"]
        assert unknown.startswith(
            "FormatError: exchange state: memories: found 'third'; wanted a parameter of the model"
        )
        assert compiled == ""


def test_dividing_by_the_ranks_that_have_data_is_refused_where_a_hook_divides(stopped):
    for rank in stopped[1]:
        assert rank["refused"][2].startswith("PlanError: join with divide_by_initial_world_size=False: our strategies")


@pytest.mark.parametrize("workers", [1, 4])
def test_a_run_may_go_on_with_another_number_of_workers(stopped, workers):
    folder, before = stopped
    owed_before = sum(training.owed_in(f"{folder}/{rank}.pt") for rank in range(len(before)))
    ranks = spawn(workers, training.go_on_with_other_workers, EXACT, folder, len(before))
    if workers == 1:  # it has nothing to send, and applies all that was kept
        np.testing.assert_array_equal(ranks[0]["applied"], owed_before + gradients(workers, 4))
    else:
        check_conserved(ranks, owed_before + gradients(workers, 4))


def test_nan_on_one_rank_is_raised_on_all_as_our_own_error_with_the_tensors_name():
    for rank in spawn(2, training.not_finite, {"codec": "onebit"}):
        for when in ("error", "next", "bare"):  # in the backward pass, in the next forward pass, with torch's wrapper
            assert rank[when].startswith("NonFiniteError: the gradient of 'first' holds NaN or infinity on some rank")


def test_after_a_gradient_that_is_not_finite_a_checkpoint_s_state_lets_training_go_on():
    ends = spawn(2, training.recover)
    for raised, applied, _, _ in ends:
        assert len(raised) == 1
        assert "holds NaN or infinity on some rank" in raised[0]
        assert (applied == ends[0][1]).all()
    assert (ends[0][1] + sum(owed for _, _, owed, _ in ends) == sum(wanted for *_, wanted in ends)).all()


def test_groups_of_some_ranks_train_by_themselves_at_the_same_time():
    ends = spawn(4, training.halves)
    for rank, ways in enumerate(ends):
        wanted = sum(training.echo_inputs(other, 0) for other in (rank % 2, rank % 2 + 2)).numpy() / 2
        assert all((applied == wanted).all() for applied in ways)


def test_copies_and_pickles_owe_what_the_wrapper_owes():
    assert spawn(2, training.copies) == [[True] * 4] * 2


def test_a_step_that_is_skipped_changes_nothing_that_is_owed():
    ranks = spawn(2, training.not_finite, {"codec": EXACT, "on_nonfinite": "skip"})
    assert all(rank["taken"] == [0, 1, 2, 3, 4, 5, 7, 8] for rank in ranks)
    skipped = sum(training.echo_inputs(rank, 6).numpy() for rank in range(2)) / 2
    check_conserved(ranks, gradients(2, 9) - skipped)


def test_torchs_own_wrapper_takes_our_hook_with_a_codec():
    ranks = spawn(2, training.echo_by_bare_hook, EXACT)
    check_conserved(ranks, gradients(2, 5))
    assert ranks[0]["sent"] > 0


def test_our_hook_takes_a_codec_written_in_python():
    ranks = spawn(2, training.echo_by_bare_hook, Int8())
    check_conserved(ranks, gradients(2, 5), 1e-4)
    assert ranks[0]["sent"] > 0


def test_what_a_parameter_is_owed_waits_until_it_is_used_again():
    ranks = spawn(2, training.leave_out, EXACT)
    used = [(rank, step) for rank in range(2) for step in range(3)] + [(1, 3)]
    check_conserved(ranks, sum(training.echo_inputs(rank, step).numpy()[:30] for rank, step in used) / 2)


def test_parameters_of_several_types_are_compressed_in_torchs_buckets():
    rank = spawn(2, torch_training.compare, {"case": {"model": "mixed", "ours": {"codec": "onebit"}}})[0]["case"][1]
    assert rank["explain"].startswith("torch's own buckets are kept: its parameters have several types")


def test_a_codec_and_a_hook_of_the_users_exclude_one_another():
    with pytest.raises(
        Exception,
        match="codec 'onebit' needs the hook for itself; register none, or leave codec",
    ):
        spawn(1, training.register_hook_beside_codec)


def test_compression_trains():
    losses = spawn(2, training.losses, {"codec": "onebit"})[0]
    assert losses[-1] < 0.2 * losses[0]


def test_small_tensors_travel_dense_where_asked(two_ranks):
    owed = two_ranks[0]["gtopk, small tensors dense"]["owed"]
    assert not owed[37:].any()  # the second tensor has 20 elements
    assert owed[:37].any()


def test_momentum_of_the_exchange_is_the_optimizers_where_everything_travels_dense():
    options = {"density": 0.1, "dense_below": 1000, "plan": training.echo_plan("sparse(density=0.1)")}
    ours = spawn(2, training.train_momentum, options, 6)
    np.testing.assert_array_equal(ours[0], spawn(2, training.train_momentum, None, 6)[0])


def test_momentum_is_corrected_as_in_deep_gradient_compression():
    plan = training.echo_plan("sparse(density=0.1)", "topk_allgather")
    ours = spawn(2, training.train_momentum, {"codec": "topk", "density": 0.1, "plan": plan}, 6)
    velocity, owed, weights = np.zeros((2, 57)), np.zeros((2, 57)), np.zeros(57)
    for step in range(6):
        for rank in range(2):
            velocity[rank] = 0.5 * velocity[rank] + training.echo_inputs(rank, step).numpy() / 2
            owed[rank] += velocity[rank]
            sent = np.concatenate([largest(owed[rank, :37], 4), 37 + largest(owed[rank, 37:], 2)])
            weights[sent] -= owed[rank, sent]
            owed[rank, sent] = velocity[rank, sent] = 0
    for each in ours:
        np.testing.assert_array_equal(each, weights)


TOPK = {"codec": "topk", "density": 0.1, "plan": training.echo_plan("sparse(density=0.1)", "topk_allgather")}
SPARSELY = {
    "plain": {},
    "clipped": {"clip": 1.5},
    "clipped, momentum": {"clip": 1.5, "momentum": 0.5},
    "clipped, momentum, going on": {"clip": 1.5, "momentum": 0.5, "resumed": True},
    "tensors clipped, Nesterov": {"clip": 1.0, "clip_by": "tensor", "momentum": 0.5, "nesterov": True},
    "not masked": {"momentum": 0.5, "momentum_masking": False},
    "Nesterov": {"momentum": 0.5, "nesterov": True},
    "several mini-batches": {"accumulate": 3, "momentum": 0.5, "clip": 2.0},
    "warm-up": {"warmup": [0.5, 0.25], "warmup_every": 2, "momentum": 0.5},
    "small tensors dense": {"dense_below": 25, "momentum": 0.5, "clip": 1.5},
    "of a bucket": {"select": "bucket", "clip": 1.5},
    "of the model": {"select": "model", "planner": "single", "momentum": 0.5},
    "clipped, nothing compressed": {"codec": None, "density": None, "plan": None, "clip": 1.5, "profile_iterations": 9},
}
SPARSE_STEPS = 6


def test_the_hook_clips_static_graphs_with_frozen_and_ignored_parameters_and_asks_for_the_module():
    for outcome in spawn_outcomes(2, training.static_graph_clipped, seconds=60.0):
        norms, told = outcome.value
        np.testing.assert_allclose(norms, [1.0, 1.0], rtol=1e-5)  # together clip * sqrt(ranks), where ranks agree
        assert "give comm_hook module=, on all ranks" in told


@pytest.fixture(scope="module")
def sparsely():
    """All cases on two ranks, in one pair of processes."""
    return spawn(2, training.train_sparse, {name: TOPK | case for name, case in SPARSELY.items()}, SPARSE_STEPS)


@pytest.mark.parametrize("case", SPARSELY)
def test_sparse_training_is_deep_gradient_compressions_written_in_numpy(sparsely, case):
    wanted, owed = deep_gradient_compression(2, SPARSE_STEPS, **SPARSELY[case])
    for rank, (weights, kept) in enumerate(found[case] for found in sparsely):
        np.testing.assert_allclose(weights, wanted, rtol=0, atol=2e-6)
        np.testing.assert_array_equal(weights, sparsely[0][case][0])
        if "codec" not in SPARSELY[case]:
            np.testing.assert_allclose(kept, owed[rank], rtol=0, atol=2e-6)


def deep_gradient_compression(
    ranks, steps, momentum=0.0, nesterov=False, momentum_masking=True, clip=np.inf, clip_by="model", accumulate=1,
    warmup=(), warmup_every=1, dense_below=0, select="tensor", codec="topk", **_,
):  # fmt: skip
    """DGC (Lin et al., Algorithm 4) on `Echo`: weights after some steps, and what each rank owes."""
    tensors = [slice(0, 37), slice(37, 57)]
    velocity, owed, weights = np.zeros((ranks, 57)), np.zeros((ranks, 57)), np.zeros(57)
    for step in range(steps):
        density = [*warmup, 0.1][min(step // warmup_every, len(warmup))] if codec else 1.0
        for rank in range(ranks):
            batches = range(step * accumulate, (step + 1) * accumulate)
            gradient = sum(training.random_inputs(rank, number).numpy().astype(float) for number in batches) / ranks
            for part in tensors if clip_by == "tensor" else [slice(0, 57)]:
                gradient[part] *= min(1.0, clip / np.sqrt(ranks) / np.linalg.norm(gradient[part]))
            velocity[rank] = (
                momentum * (velocity[rank] + gradient) if nesterov else momentum * velocity[rank] + gradient
            )
            owed[rank] += velocity[rank] + (gradient if nesterov else 0)
            if not momentum:
                velocity[rank] = 0
            for part in tensors if select == "tensor" else [slice(0, 57)]:
                size = part.stop - part.start
                dense = size < dense_below
                sent = part.start + largest(owed[rank, part], size if dense else max(1, round(density * size)))
                weights[sent] -= owed[rank, sent]
                owed[rank, sent] = 0
                if momentum_masking and not dense:
                    velocity[rank, sent] = 0
    return weights, owed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "gtopk", "select": "layer"}, "select='layer'; wanted one of tensor, bucket, model"),
        ({"codec": "onebit", "select": "bucket"}, "select='bucket' with codec 'onebit'; wanted one of gtopk, topk"),
        ({"codec": "gtopk", "select": "model"}, "select='model' with planner 'exact'; wanted 'single'"),
        ({"codec": "gtopk", "clip": 0.0}, "gradients clipped to norm 0.0; wanted more than 0"),
        ({"codec": "gtopk", "density": "0.1"}, "density is '0.1'; wanted a number such as 0.001"),
        ({"codec": 5}, "codec is 5; wanted a name such as 'onebit', a Codec, or None"),
        ({"codec": "onebit", "dense_below": -5}, "dense_below is -5; wanted a number of elements, 0 or more"),
        ({"codec": "gtopk", "warmup_every": 5}, "warmup_every is 5, and there is no warmup; wanted both, or neither"),
        ({"density": 0.1}, "density or warmup without a codec; wanted one of gtopk, topk, gtopk_published"),
        ({"codec": "onebit(foo=1)"}, "codec 'onebit': no parameter 'foo'; wanted block"),
        ({"codec": "terngrad(foo=1)"}, "codec 'terngrad': no parameter 'foo'; wanted bitwidth, block"),
        ({"codec": "auto", "planner": "wfbp"}, "codec 'auto' with planner 'wfbp': it compares the best plans; wanted"),
    ],
)
def test_sparse_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(CodecError, match="^" + re.escape(message)):
        DistributedDataParallel(torch.nn.Linear(1, 1), **options)


@pytest.mark.parametrize("option", ["network", "trace", "plan"])
def test_files_may_be_given_as_paths(option, tmp_path):
    with pytest.raises(FormatError, match=f"missing.json: file: .*; wanted a readable penstock-{option}/1 file"):
        DistributedDataParallel(torch.nn.Linear(1, 1), **{option: tmp_path / "missing.json"})


def largest(values, count):
    """Indices of the largest magnitudes, the lowest index first among equals."""
    return np.argsort(-np.abs(values), kind="stable")[:count]


def test_the_largest_entries_of_a_model_are_refused_where_no_plan_can_put_it_into_one_bucket():
    for told in spawn(2, training.entries_of_a_model_without_a_plan):
        assert told.startswith("select='model' without a plan, since its parameters have several types")


def test_density_warms_up_stage_by_stage_on_all_ranks_alike():
    ranks = spawn(2, training.densities)
    assert ranks[0] == ranks[1] == [18 + 10, 18 + 10, 9 + 5, 9 + 5, 1 + 1, 1 + 1, 1 + 1]  # of 37 and 20 elements


@pytest.mark.parametrize(("line", "codec"), [(1e-6, "onebit"), (1.0, "bf16")])
def test_auto_chooses_what_is_predicted_to_pay_on_all_ranks_and_says_so_in_one_line(line, codec):
    ranks = spawn(2, training.echo_auto, line)
    assert ranks[0]["plan"] == ranks[1]["plan"]
    assert {bucket.codec for bucket in ranks[0]["plan"].buckets} == {codec}
    said = [each for each in ranks[0]["explain"].splitlines() if each.startswith("compression is on")]
    assert re.fullmatch(
        rf"compression is on: {codec} for all gradients, [0-9.]+ times as fast as dense; "
        r"predicted iteration: dense [0-9.]+ ms, bf16 [0-9.]+ ms, onebit [0-9.]+ ms",
        said[0],
    )
