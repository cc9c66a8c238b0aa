"""A rank that dies while others make a process group: they end within the group's timeout and name it."""

import os
import signal
from datetime import timedelta

import torch.distributed as dist

from penstock.errors import TransportError
from spawn import spawn_outcomes


def make_groups(rank, victim):
    """Make a process group beside one whose calls may take three seconds; one rank dies before."""
    from penstock.torch.engines import own_group

    parent = dist.new_group(timeout=timedelta(seconds=3))
    dist.barrier(parent)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        own_group(parent)
    except TransportError as error:
        return str(error)


def test_survivors_of_a_death_before_a_group_is_made_name_the_dead_rank():
    ended = spawn_outcomes(3, make_groups, 1)
    assert ended[1].exit_code == -9
    for rank in (0, 2):
        assert isinstance(ended[rank].value, str), repr(ended[rank].value)
        assert "; rank 1 did not answer before the timeout: it died, " in ended[rank].value
        assert "step making a process group" in ended[rank].value
