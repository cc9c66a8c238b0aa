"""What each process of a training test does: run a job in a group that exists, and hand back what it told."""

import torch.distributed as dist

from penstock.train.job import Job
from penstock.train.stopping import Wish
from penstock.train.worker import work


def run(rank, options, wish_after=0):
    """Run a job; rank 1 wishes to stop after so many events where `wish_after` says so."""
    wish, events = Wish(), []

    def tell(event):
        events.append(event)

    if wish_after and rank == dist.get_world_size() - 1:
        wish.made = 1
    finished = work(Job(workers=dist.get_world_size(), **options), tell, wish, rank)
    return finished, events


def run_several(rank, jobs):
    """Run jobs one after the other in the same group."""
    return [run(rank, options) for options in jobs]
