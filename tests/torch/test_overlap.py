"""The bulk-synchronous algorithms compute what plain data parallelism computes, on all ranks alike."""

import numpy as np
import pytest

import torch_training as training
from spawn import spawn

torch = pytest.importorskip("torch")
import torch_cuda  # noqa: E402

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ALGORITHMS = ["reduce_broadcast", "all_reduce", "layers", "split"]
MODELS = ["plain", "tied", "frozen", "attentive", "branches"]
CASES = [(model, algorithm, "") for model in MODELS for algorithm in ALGORITHMS]
CASES += [("plain", "reduce_broadcast", "spanning_tree"), ("plain", "all_reduce", "recursive_doubling")]
CASES += [("plain", "layers", "spanning_tree"), ("plain", "split", "bidirectional_exchange")]


FEW = [("plain", algorithm, "") for algorithm in ALGORITHMS]


def check(ours, theirs, case):
    for name, value in ours[0][case]["state"].items():
        np.testing.assert_allclose(value, theirs[0][case[0]]["state"][name], rtol=5e-5, atol=5e-6)
        for other in ours[1:]:
            np.testing.assert_array_equal(value, other[case]["state"][name])


@pytest.fixture(scope="module")
def two_ranks():
    return spawn(2, training.train_bulk_synchronous, CASES), spawn(2, training.train_plain, MODELS)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_weights_are_those_of_plain_data_parallelism_on_every_rank(two_ranks, case):
    check(*two_ranks, case)


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_world_size(world_size):
    ours = spawn(world_size, training.train_bulk_synchronous, FEW)
    theirs = spawn(world_size, training.train_plain, ["plain"])
    for case in FEW:
        check(ours, theirs, case)


def test_gradients_that_come_late_from_a_device_are_waited_for():
    cases = [(model, algorithm, "") for model in ("plain", "branches") for algorithm in ALGORITHMS]
    late, soon = spawn(2, training.train_bulk_synchronous_late, cases), spawn(2, training.train_bulk_synchronous, cases)
    for case in cases:
        for rank in (0, 1):
            for name, value in late[rank][case]["state"].items():
                np.testing.assert_array_equal(value, soon[rank][case]["state"][name])


@pytest.fixture(scope="module")
def otherwise():
    return spawn(2, training.train_bulk_synchronous_otherwise, ALGORITHMS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("when", ["halfway", "state"])
def test_schedules_and_passes_that_add_up_are_those_of_torch(otherwise, algorithm, when):
    for name, value in otherwise[0][algorithm][when].items():
        np.testing.assert_allclose(value, otherwise[0]["torch"][when][name], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(value, otherwise[1][algorithm][when][name])


@pytest.mark.parametrize(("algorithm", "says_so"), [("layers", False), ("split", False), ("split", True)])
def test_a_second_backward_pass_that_would_be_lost_is_refused(algorithm, says_so):
    (found,) = spawn(1, training.pass_backward_twice, algorithm, says_so)
    assert "a second backward pass before step(), when its gradients are on their way; run all but" in found["message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"algorithm": "best"},
            "no algorithm called 'best'; wanted one of reduce_broadcast, all_reduce",
        ),
        ({"resync_every": 0}, "resync_every is 0; wanted at least 1"),
        ({"strategy": "best"}, "no strategy called 'best' carries what algorithm 'split' sends; wanted one of .*ring"),
        ({"strategy": "gtopk", "algorithm": "layers"}, "no strategy called 'gtopk' .*; wanted one of bidirectional_ex"),
        (
            {"strategy": "ring", "algorithm": "layers"},
            "no strategy called 'ring' carries what algorithm 'layers' sends",
        ),
        (
            {"strategy": "double_tree", "algorithm": "reduce_broadcast"},
            "no strategy called 'double_tree' .* native, sp",
        ),
        ({"codec": "onebit", "algorithm": "layers"}, "codec= with algorithm 'layers'; wanted 'split', or leave it out"),
        ({"engine": "smoke"}, "no engine called 'smoke'; wanted 'mpi'"),
    ],
)
def test_bad_options_are_refused(options, message):
    torch = pytest.importorskip("torch")
    from penstock.errors import PlanError
    from penstock.torch.overlap import BulkSynchronous

    with pytest.raises(PlanError, match=message):
        BulkSynchronous(torch.nn.Linear(1, 1), torch.optim.SGD, **options)


@pytest.mark.root
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
)
def test_hosts_that_share_a_gpu_have_over_nccl_the_bits_of_gloo(device):
    """Gradients are exact, so that their sum is the same in any order."""
    found = torch_cuda.on_hosts(2, device, "next_forward", *ALGORITHMS)
    for algorithm in ALGORITHMS:
        wanted = spawn(2, torch_cuda.next_forward, "cpu", algorithm, {})
        assert found[algorithm] == [torch_cuda.digest(each) for each in wanted]
