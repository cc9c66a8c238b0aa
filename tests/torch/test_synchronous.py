"""Collectives on a thread of their own: one failure ends all that follow, a mistaken call none."""

from types import SimpleNamespace

import pytest
import torch

from adaptor.worlds import run_worlds
from penstock.errors import PenstockError, TransportError
from penstock.network import Network
from penstock.program import Op
from penstock.runtime import handshake, request
from penstock.runtime.measure_network import Measurement
from penstock.torch import synchronous
from penstock.torch.layered import Layers
from penstock.torch.synchronous import AllReduce, ReduceBroadcast, Sender


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


def sends_of(world, algorithm, strategy):
    """Train two parameters of 149 elements for a step; return the sends of each program on them and their two flags."""
    module = torch.nn.Linear(148, 1)
    bsp = algorithm(module, lambda parameters: torch.optim.SGD(parameters, lr=0.1), world, strategy, 5, {})
    bsp.begin()
    module(torch.ones(2, 148)).sum().backward()
    bsp.step()
    bsp.close()
    found = {}
    for (key, numel, *_), prepared in world.communicator._prepared.items():
        if numel == 151:
            found[key[0].value, key[1]] = sum(one.op is Op.SEND for one in prepared.part.instructions)
    return found


@pytest.mark.parametrize(("algorithm", "strategy"), [(Layers, ""), (ReduceBroadcast, "linear_pipeline")])
def test_pipelines_take_the_block_that_is_best_on_the_measured_links(monkeypatch, algorithm, strategy):
    """A rank in the middle of three sends one message a block: b = sqrt(n alpha / 2 beta) = 123 bytes of 604."""
    network = Network(3, 1e-6, 2e-8, 0.0)
    monkeypatch.setattr(request, "SMALLEST_BLOCK", 1)
    monkeypatch.setattr(handshake, "shared_cores", lambda claims: 0)  # as on several hosts
    monkeypatch.setattr(synchronous, "measure_links", lambda *_, **__: Measurement(network, {}))
    found = run_worlds(3, lambda world: sends_of(world, algorithm, strategy))
    assert found[1] == {("reduce", "linear_pipeline"): 5, ("broadcast", "linear_pipeline"): 5}


@pytest.mark.parametrize(
    ("algorithm", "strategy", "cores"), [(AllReduce, "", 0), (Layers, "spanning_tree", 0), (Layers, "", 2)]
)
def test_links_are_not_measured_where_no_block_follows_from_them(monkeypatch, algorithm, strategy, cores):
    """No pipeline, or ranks that share a host's few cores."""

    def measure_links(*_, **__):
        raise AssertionError("measured")

    monkeypatch.setattr(handshake, "shared_cores", lambda claims: cores)
    monkeypatch.setattr(synchronous, "measure_links", measure_links, raising=False)
    run_worlds(3, lambda world: sends_of(world, algorithm, strategy))


def test_a_strategys_options_are_passed_on():
    found = run_worlds(4, lambda world: sends_of(world, AllReduce, "hierarchical(ranks_per_node=2)"))
    assert ("all_reduce", "hierarchical") in found[0]
