"""A rank dies while torch does something with all ranks at our request: the others name it."""

import pytest

from spawn import spawn_outcomes
from torch_lost import survive


@pytest.mark.parametrize("phase", ["construction", "steps"])
def test_a_rank_that_dies_while_torch_communicates_is_named(phase):
    ended = spawn_outcomes(3, survive, 1, phase)
    assert ended[1].exit_code == -9
    for rank in (0, 2):
        assert ended[rank].value.startswith(f"torch.distributed: rank {rank}, step ")
        said = ended[rank].value.split("; ")[-1]  # on a very busy machine another rank's note may come too late
        assert "rank 1" in said
        assert said.endswith("left no word: it died, hangs, or has ended")
