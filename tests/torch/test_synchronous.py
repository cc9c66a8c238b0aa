"""Lanes of collectives: in order within one, whatever the others wait for."""

from threading import Event
from types import SimpleNamespace

import pytest
import torch

from penstock.errors import PenstockError, TransportError
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


class Broken:
    """A communicator whose first collective fails, and all others because of that."""

    def __init__(self, lost):
        self.transport = SimpleNamespace(rank=0, world_size=2)
        self.lost = lost

    def reduce_scatter(self, values):
        raise self.lost

    def all_gather(self, values):
        raise PenstockError(f"this communicator failed before ({self.lost}); make a new one")


def test_what_follows_a_failure_raises_the_failure_itself_in_every_lane():
    lost = TransportError("ring", 0, "3", 1, "closed")
    sender = Sender([Broken(lost), Broken(PenstockError("not this one"))])
    first = sender.start("reduce_scatter", torch.zeros(1))
    for lane in (0, 1):
        with pytest.raises(TransportError) as raised:
            sender.start("all_gather", torch.zeros(1), lane).result(10 if first.exception(10) else 0)
        assert raised.value is lost
    sender.close()


def test_a_mistaken_call_spoils_nothing():
    sender = Sender([Broken(PenstockError("no such strategy"))])
    with pytest.raises(PenstockError, match="no such strategy"):
        sender.start("reduce_scatter", torch.zeros(1)).result(10)
    with pytest.raises(PenstockError, match="failed before"):
        sender.start("all_gather", torch.zeros(1)).result(10)
    sender.close()
