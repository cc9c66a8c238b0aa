"""What each process of a training test does: run a job in a group that exists, and hand back what it told."""

import importlib
import itertools
import os
import signal

import torch
import torch.distributed as dist

from penstock.errors import TransportError
from penstock.train.events import Wish
from penstock.train.job import Job
from penstock.train.loop import same_weights
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


def survive(rank, options, victim, module, function, call):
    """Run a job whose rank `victim` is killed when it calls a function for the so manieth time; return the error."""
    if rank == victim:
        _kill_at(importlib.import_module(module), function, call)
    try:
        return run(rank, options)
    except TransportError as error:
        return str(error)


def _kill_at(module, function, call):
    real, calls = getattr(module, function), itertools.count(1)

    def fatal(*arguments, **named):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    setattr(module, function, fatal)


def digest(rank, shapes):
    """Return what `same_weights` says of parameters of such shapes."""
    parameters = [torch.nn.Parameter(torch.full(shape, 1.5)) for shape in shapes]
    return same_weights(torch.nn.ParameterList(parameters))
