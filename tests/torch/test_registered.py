"""An operator that is registered as docs/language.md says is used in training, and changes what is sent."""

import torch_registered as training
from spawn import spawn


def test_an_operator_registered_on_every_rank_changes_what_ddp_sends(tmp_path):
    """The second half of the gradient is set to 0 before it is sent, in both steps: what is owed of it is not sent."""
    with_operator, without = training.write(tmp_path)
    average = [1.5 * index for index in range(1, 9)]
    for steps, routes in spawn(2, training.train, without):
        assert steps[0] == average
        assert f"by ring+{without}," in routes
    for steps, routes in spawn(2, training.train, with_operator):
        assert steps == 2 * [average[:4] + 4 * [0.0]]
        assert f"by ring+{with_operator}," in routes
