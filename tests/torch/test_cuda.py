"""The wrapper on a GPU, alone and with two processes that share it over gloo."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from spawn import spawn  # noqa: E402
from torch_cuda import (  # noqa: E402
    digest,
    exchanged,
    next_forward,
    next_forward_by_layers,
    on_hosts,
    planned,
    planned_over_nccl,
    sparse,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ring"},
        {"codec": "gtopk", "density": 0.01},
        {"codec": "gtopk", "density": 0.01, "momentum": 0.5, "dense_below": 100},
        {"codec": "gtopk_published", "density": 0.01},
        {"codec": "topk(density=0.05)"},
    ],
    ids=str,
)
def test_buckets_on_the_gpu_are_averaged_to_the_bits_of_the_cpu(options, world_size):
    there = spawn(world_size, exchanged, "cuda", options)
    here = spawn(world_size, exchanged, "cpu", options)
    for (averaged, owed), (wanted, wanted_owed) in zip(there, here, strict=True):
        assert averaged == wanted
        assert owed.keys() == wanted_owed.keys()
        for name, values in owed.items():
            np.testing.assert_array_equal(values, wanted_owed[name])


@pytest.mark.parametrize("codec", ["onebit", "terngrad(bitwidth=2)", "gtopk"])
def test_two_ranks_on_one_gpu_get_the_same_bits(codec):
    (one, _), (other, _) = spawn(2, exchanged, "cuda", {"codec": codec})
    assert one == other


@pytest.mark.parametrize("codec", ["onebit", "gtopk"])
def test_a_gradient_that_is_not_finite_leaves_what_is_owed_as_it_was(codec):
    options = {"codec": codec, "on_nonfinite": "skip"}
    spoilt = spawn(2, exchanged, "cuda", options, 2)
    for averaged, _ in spoilt:
        assert np.isnan(np.frombuffer(averaged[7], np.float32)).any()
        assert np.isfinite(np.frombuffer(averaged[6], np.float32)).all()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("codec", [None, "onebit", "gtopk(density=0.05)"])
def test_the_wrapper_profiles_plans_and_trains_on_the_gpu(codec, world_size):
    found = spawn(world_size, planned, {"codec": codec})
    assert len({digest for digest, _, _ in found}) == 1
    assert "plan " in found[0][1]
    assert found[0][2] < 0.9


@pytest.mark.parametrize("codec", [None, "onebit", "gtopk(density=0.05)"])
def test_one_worker_of_nccl_profiles_plans_and_trains(codec):
    ((_, explained, fell),) = spawn(1, planned_over_nccl, {"codec": codec})
    assert "plan " in explained
    assert fell < 0.9


@pytest.mark.parametrize("codec", ["onebit", "gtopk"])
def test_a_worker_that_is_alone_keeps_its_gradients_and_what_is_not_finite_in_them(codec):
    """It sends nothing, so nothing is encoded, and nothing is refused that stock DDP takes."""
    ((found, owed),), ((wanted, _),) = (spawn(1, exchanged, "cuda", {"codec": each}, 1) for each in (codec, None))
    assert found == wanted
    assert not np.isfinite(np.frombuffer(found[4], np.float32)).all()
    assert not owed


@pytest.mark.root
@pytest.mark.parametrize("hosts", [3, 4])
def test_gtopk_queued_over_nccl_has_the_bits_of_cpus_over_gloo(hosts):
    """Averages, and what each rank owes: program, order of sums and arithmetic are the same."""
    assert on_hosts(hosts, "cuda", "sparse", "gtopk")["gtopk"] == [digest(each) for each in spawn(hosts, sparse, "cpu")]


@pytest.mark.root
def test_sparse_sums_queued_over_nccl_have_the_bits_of_those_merged_on_the_host():
    """Each rank compares both routes, of what is not finite and of sums that overflow too."""
    assert len(set(on_hosts(4, "cuda", "sparse_routes", "every")["every"])) == 1


@pytest.mark.root
def test_ranks_that_train_by_a_plan_of_gtopk_over_nccl_end_with_the_same_weights():
    assert len(set(on_hosts(4, "cuda", "sparse_plan", "gtopk")["gtopk"])) == 1


ALGORITHMS = ["reduce_broadcast", "all_reduce", "layers", "split"]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("algorithm", "options"), [*((name, {}) for name in ALGORITHMS), ("split", {"codec": "onebit"})], ids=str
)
def test_the_next_forward_wrapper_on_the_gpu_has_the_bits_of_the_cpu(algorithm, options, world_size):
    there = spawn(world_size, next_forward, "cuda", algorithm, options)
    here = spawn(world_size, next_forward, "cpu", algorithm, options)
    assert there == here


@pytest.mark.parametrize("algorithm", ["layers", "split"])
def test_each_layers_forward_pass_on_the_gpu_waits_for_its_update(algorithm):
    there, here = (spawn(2, next_forward_by_layers, device, algorithm) for device in ("cuda", "cpu"))
    for rank in (0, 1):
        for value, wanted in zip(there[rank], here[rank], strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-12)
