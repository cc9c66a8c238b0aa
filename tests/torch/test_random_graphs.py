"""Random modules, and the zoo: weights as torch's wrapper gives them, the same bits on all ranks, by every method."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_graphs
from penstock.zoo import ZOO
from spawn import spawn_outcomes

ALGORITHMS = ["reduce_broadcast", "all_reduce", "layers", "split"]

sources = st.lists(st.integers(0, 8), min_size=1, max_size=3)
layers = st.tuples(st.sampled_from([*torch_graphs.KINDS, "shared"]), sources)
graphs = st.lists(layers, min_size=1, max_size=6)


def check(ranks, rtol=2e-4, atol=2e-5):
    """Every method's weights are torch's within float32 summation error, and the same bits on every rank."""
    for method, weights in ranks[0].items():
        for index, weight in enumerate(weights):
            np.testing.assert_allclose(weight, ranks[0]["torch"][index], rtol=rtol, atol=atol, err_msg=method)
            for other in ranks[1:]:
                np.testing.assert_array_equal(weight, other[method][index], err_msg=method)


def check_graphs(world_size, drawn):
    """Train graphs on so many workers."""
    for ranks in zip(*run(world_size, torch_graphs.train_graphs, drawn, ALGORITHMS), strict=True):
        check(ranks)


def run(world_size, function, *arguments):
    """Let every rank have the time that a busy machine takes."""
    found = [outcome.value for outcome in spawn_outcomes(world_size, function, *arguments, seconds=1500)]
    for each in found:
        assert not isinstance(each, Exception), each
    return found


@pytest.mark.slow
@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(graphs, min_size=2, max_size=2))
def test_random_modules_train_as_with_torch_by_every_planner_and_algorithm(drawn):
    check_graphs(2, drawn)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(graphs, min_size=3, max_size=4))
def test_many_random_modules_on_any_number_of_workers(world_size, drawn):
    check_graphs(world_size, drawn)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ZOO)
def test_the_zoo_trains_as_with_torch(model, world_size):
    arguments = (model, ALGORITHMS[:3], torch_graphs.ITERATIONS)
    check(run(world_size, torch_graphs.train_zoo, *arguments), rtol=5e-3, atol=5e-4)
