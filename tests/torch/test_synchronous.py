"""Collectives on a thread of their own: one failure ends all that follow, a mistaken call none."""

from types import SimpleNamespace

import pytest
import torch

from penstock.errors import PenstockError, TransportError
from penstock.torch.synchronous import Sender


class Broken:
    """A communicator whose first collective fails, and all others because of that."""

    def __init__(self, lost):
        self.transport = SimpleNamespace(rank=0, world_size=2)
        self.lost = lost

    def reduce_scatter(self, values):
        raise self.lost

    def all_gather(self, values):
        raise PenstockError(f"this communicator failed before ({self.lost}); make a new one")


def test_what_follows_a_failure_raises_the_failure_itself():
    lost = TransportError("ring", 0, "3", 1, "closed")
    sender = Sender(Broken(lost))
    first = sender.start("reduce_scatter", torch.zeros(1))
    with pytest.raises(TransportError) as raised:
        sender.start("all_gather", torch.zeros(1)).result(10 if first.exception(10) else 0)
    assert raised.value is lost
    sender.close()


def test_a_mistaken_call_spoils_nothing():
    sender = Sender(Broken(PenstockError("no such strategy")))
    with pytest.raises(PenstockError, match="no such strategy"):
        sender.start("reduce_scatter", torch.zeros(1)).result(10)
    with pytest.raises(PenstockError, match="failed before"):
        sender.start("all_gather", torch.zeros(1)).result(10)
    sender.close()
