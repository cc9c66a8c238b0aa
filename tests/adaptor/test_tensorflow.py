"""penstock.tensorflow on two ranks: collectives, tapes, optimizers and callbacks, in eager mode and in graphs.

Importing TensorFlow takes seconds, so one start of two ranks does all checks (`worker_tensorflow.py`), whose oracles
are numpy and TensorFlow itself. Each test here says what one of them shows; docs/horovod-tests.md names them beside
Horovod's.
"""

from functools import cache
from importlib.util import find_spec

import pytest

from adaptor.frameworks import run_workers, worker_outcomes

# Not `importorskip`: a process that has imported TensorFlow is aborted when Triton, which brings an LLVM too, follows.
if find_spec("tensorflow") is None:
    pytest.skip("install penstock[tensorflow] to test its adaptor", allow_module_level=True)


@cache
def found(world_size: int = 2, engine: str = "gloo") -> list[dict]:
    """What each rank found."""
    return run_workers(world_size, "worker_tensorflow.py", engine=engine)


def of(check: str, world_size: int = 2, engine: str = "gloo") -> list:
    """What a check returned on each rank; what went wrong in it is raised here."""
    results = [each[check] for each in found(world_size, engine)]
    for rank, each in enumerate(results):
        assert not (isinstance(each, dict) and "failed" in each), f"rank {rank}: {each['trace']}"
    return results


CHECKS = {
    "sums_in_every_type": "sums over ranks are exact in eight types, of scalars and tensors",
    "averages": "averages, and Horovod's older average=False",
    "other_ops": "min, max and product, alone and in groups",
    "factors": "factors before and after",
    "half_on_the_wire": "Compression.fp16 leaves types as they were",
    "groups": "tensors of several types in one group",
    "sparse_sums": "slices are gathered; what they cannot be is refused",
    "gradients_of_collectives": "gradients flow through all-reduce, all-gather and broadcast",
    "rows_of_all": "rows are gathered whatever their number",
    "broadcasts": "every rank may be the root, in nine types",
    "variables_of_the_root": "variables of TensorFlow and of Keras",
    "objects": "any Python value",
    "tape_gradients": "gradients are those of the whole batch; structures are kept",
    "sparse_gradients": "IndexedSlices are gathered or made dense",
    "half_gradients": "float16, bfloat16 and float64",
    "local_gradients": "local layers stay local",
    "saved_models": "models are saved and loaded with the optimizer's state",
    "states_of_optimizers": "what is owed goes into checkpoints",
    "aggregated_passes": "several backward passes for one step",
    "optimizers_of_users": "schedules, own optimizers, local variables and slices in optimizers",
    "metrics_of_all": "metrics are averaged over ranks",
    "local_variables_of_callbacks": "local variables keep their values",
    "learning_rates": "warm-up and schedules, with corrected momentum",
}


@pytest.mark.parametrize("check", list(CHECKS))
def test_it_does_what_horovod_does(check):
    of(check)


def test_every_rank_knows_its_place():
    assert of("places") == [[0, 2, 0, 2], [1, 2, 1, 2]]


def test_ranks_that_bring_different_things_are_told_the_same():
    first, second = of("mismatches")
    assert first == second
    for text, wanted in zip(
        first,
        [
            "rank 0 brings (3,) of float32, rank 1 (4,) of float32",
            "rank 1 (3,) of int32",
            "rank 0 brings 1 tensors, rank 1 2",
            "rows of (3,) of float32, rank 1 all-gather of rows of (4,)",
            "rows of () of float32, rank 1 all-gather of rows of () of int32",
            "rank 0 brings (3,) of float32, rank 1 (4,) of float32",
            "rank 1 (3,) of int32",
            "rank 0 calls broadcast from rank 0, rank 1 broadcast from rank 1",
            "root rank 99; wanted 0 to 1",
            "wanted op alone",
        ],
        strict=True,
    ):
        assert wanted in text


def test_a_gradient_that_is_none_on_some_ranks_is_told_of_on_all():
    first, second = of("tapes_without_gradients")
    assert first == second
    eager, graph, sparse, one_more, none, slices = first
    assert eager.startswith("rank 1: the gradient of 'unused' is dense now, and was none in the first iteration; give")
    assert graph == eager
    assert sparse.startswith("rank 1: the gradient of 'used' is slices now, and was dense in the first iteration")
    assert "parameter 1 is none on rank 0 and 'b', (1,) of float32 on rank 1" in one_more
    assert "in the first iteration rank 0 has no gradients, and rank 1 has dense gradients" in none
    assert "rank 0 has dense gradients, and rank 1 has dense gradients and slices of ['table']" in slices


def test_a_gradient_that_is_none_later_counts_as_zeros_and_ranks_stay_alike():
    first, second = of("gradients_missing_later")
    assert first == second


def test_different_models_and_options_are_told_of_on_all_ranks():
    first, second = of("different_models")
    assert first == second
    assert "parameter 0 is 'weights', (3,) of float32 on rank 0 and 'weights', (4,)" in first[0]
    assert "codec is None on rank 0 and 'onebit' on rank 1" in first[1]


def test_nan_with_a_codec_is_told_of_on_all_ranks_in_eager_mode_and_in_a_graph():
    for texts in of("not_finite"):
        assert all("the gradient of 'coded' holds NaN or infinity on some rank" in text for text in texts)


def test_fit_trains_by_a_plan_with_the_same_weights_on_all_ranks():
    first, second = of("fits")
    assert first == second  # weights to the bit; metrics are averaged
    assert first["dense"]["routes"] == ["native"]
    assert first["onebit"]["routes"] == ["ring+onebit"]
    assert first["auto"]["routes"] == ["ring+onebit"]  # which is cheaper on this network
    assert "messages by ring+onebit on 2 workers" in first["onebit"]["explained"]
    assert first["dense"]["names"][:2] == ["sequential/dense/kernel", "sequential/dense/bias"]


def test_scaled_losses_skip_steps_on_all_ranks_alike():
    (refused, weights), (also_refused, others) = of("scaled_losses")
    assert weights == others
    assert "the other way round" in refused
    assert "the other way round" in also_refused


def test_bad_arguments_are_refused():
    for first, second, third, fourth in of("bad_arguments"):
        assert "wanted a Keras 3 optimizer" in first
        assert "averages gradients already" in second
        assert "backward_passes_per_step is 0; wanted at least 1" in third
        assert "nothing was averaged yet" in fourth


def test_what_horovods_scripts_hand_over_has_its_meaning_or_an_answer():
    first, second = of("horovods_arguments")
    assert first == second
    for text, wanted in zip(
        first,
        [
            "groups= has no effect: a plan says which gradients travel together",
            "num_groups= has no effect",
            "device_dense='/gpu:0' has no effect: tensors travel through host memory",
            "PlanError: op='max' of gradients; wanted Average or Sum",
            "PlanError: gradient_predivide_factor=2.0 with op='sum'; wanted a number above 0, and op=Average",
            "PlanError: groups=0; wanted a number above 0 or a list",
            "PlanError: process_set='some'; wanted none: gradients are averaged over all ranks",
            "PlanError: process_set='some'; wanted none",
            "TypeError: unexpected keyword argument 'names'",
            "AttributeError: penstock.tensorflow has no alltoall, which Horovod has; use allgather",
            "AttributeError: module 'penstock.tensorflow' has no attribute 'nothing_of_the_kind'",
        ],
        strict=True,
    ):
        assert wanted in text


def test_xla_is_refused_with_a_way_out():
    assert all("pass jit_compile=False to model.compile" in each for each in of("jit_is_refused"))


def test_buckets_arrive_while_later_gradients_are_computed():
    assert all(each["early"] for each in of("sends_during_backward"))


def test_buckets_stay_where_they_are_when_the_optimizer_has_applied_their_averages():
    assert all(each["stay"] for each in of("sends_during_backward"))


def test_ranks_are_alike_to_the_bit_after_200_steps():
    first, second = of("training")
    for codec in ("None", "onebit", "gtopk"):
        assert first[codec]["weights"] == second[codec]["weights"]
        assert first[codec]["loss"] < 0.5  # of 1.1 at first
    assert first["onebit"]["sent"] < 0.2 * first["None"]["sent"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_dies_is_named_on_all_others(world_size):
    outcomes = worker_outcomes(world_size, "worker_tensorflow.py", "dies")
    assert outcomes[-1][1] == 7
    for result, _, _ in outcomes[:-1]:
        assert f"rank {world_size - 1}" in result["told"]


@pytest.mark.slow
def test_the_loss_is_that_of_mirrored_strategy():
    (wanted,) = run_workers(1, "worker_mirrored.py")
    ours = of("training")[0]
    assert abs(ours["None"]["loss"] - wanted["loss"]) < 1e-3
    assert abs(ours["onebit"]["loss"] - wanted["loss"]) < 0.1
    assert abs(ours["gtopk"]["loss"] - wanted["loss"]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "engine"), [(3, "gloo"), (2, "mpi")])
@pytest.mark.parametrize("check", [*CHECKS, "fits", "training"])
def test_it_does_so_on_three_ranks_and_over_mpi(check, world_size, engine):
    results = of(check, world_size, engine)
    if check == "training":  # of three ranks some send more than others
        results = [{codec: (run["weights"], run["loss"]) for codec, run in each.items()} for each in results]
    assert all(each == results[0] for each in results)
