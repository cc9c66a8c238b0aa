"""Whether anything is lost: what was applied plus what is owed is what the gradients of `Echo` were."""

import numpy as np

import torch_compressed as training

EXACT = "topk(density=0.25)"  # sends values as they are: on dyadic gradients every sum is exact
STEPS = 8


def gradients(world_size, steps=STEPS):
    """What all ranks' gradients add up to, as plain data parallelism applies it."""
    each = (training.echo_inputs(rank, step).numpy() for rank in range(world_size) for step in range(steps))
    return sum(each) / np.float32(world_size)


def check_conserved(ranks, wanted, tolerance=0.0):
    """All ranks applied the same, and what they did not apply they owe."""
    for rank in ranks[1:]:
        np.testing.assert_array_equal(rank["applied"], ranks[0]["applied"])
    total = ranks[0]["applied"] + sum(rank["owed"] for rank in ranks)
    np.testing.assert_allclose(total, wanted, rtol=0, atol=tolerance)
    assert any(rank["owed"].any() for rank in ranks)  # otherwise nothing was compressed
