"""Lanes of collectives: in order within one, whatever the others wait for."""

from threading import Event
from types import SimpleNamespace

import torch

from penstock.torch.synchronous import Sender


class Slow:
    """A communicator whose collectives note their values, once they may."""

    def __init__(self, noted, may_go):
        self.transport = SimpleNamespace(rank=0, world_size=1)
        self.noted, self.may_go = noted, may_go

    def all_reduce(self, values):
        assert self.may_go.wait(10)
        self.noted.append(int(values))


def test_a_lane_that_waits_holds_up_only_what_comes_after_it_in_the_same_lane():
    noted, held, free = [], Event(), Event()
    free.set()
    sender = Sender([Slow(noted, held), Slow(noted, free)])
    waiting = [sender.start("all_reduce", torch.tensor(value)) for value in (1, 2)]
    sender.start("all_reduce", torch.tensor(3), 1).result(10)
    assert noted == [3]
    held.set()
    sender.close()
    assert noted == [3, 1, 2]
    assert all(each.done() for each in waiting)
