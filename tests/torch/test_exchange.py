"""What an exchange keeps of a gradient depends on its codec."""

import torch

from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.runtime.communicator import Communicator
from penstock.runtime.transport.memory import Fabric
from penstock.torch.compression import make_compression
from penstock.torch.drift import Drift
from penstock.torch.exchange import Exchange, Memory, Parcel
from penstock.torch.explain import explain
from penstock.torch.planning import decide
from penstock.torch.traffic import CountingTransport
from penstock.trace import Tensor, Trace


def exchanged(codec: str, iterations: int = 3) -> Memory:
    transport = CountingTransport(Fabric(1).transport(0))
    memory = Memory(make_compression(codec))
    exchange = Exchange(Communicator(transport), transport, memory, leaves_out=False)
    for _ in range(iterations):
        values = torch.linspace(-1, 1, 2000)
        exchange.average(Parcel(values, ("weight",), (2000,), Route("ring", codec), is_first=True))
    return memory


def test_a_codec_whose_noise_exceeds_what_it_rounds_keeps_no_residual() -> None:
    assert exchanged("qsgd").residuals.values() == {}
    assert exchanged("onebit").residuals.values()["weight"].any()


def test_a_plan_with_such_a_codec_says_so() -> None:
    trace = Trace("model", "cpu", 1, "float32", 0.0, (Tensor("weight", 2000, 1e-3),))
    routes = [Route("ring", codec) for codec in ("qsgd", "onebit")]
    network = Network(2, 1e-4, 1e-9, 1e-10, all_reduce={str(route): LinearCost(1e-3, 1e-9) for route in routes})
    decision = decide(trace, network, "single", routes)
    note = "qsgd travels without error feedback: its noise is larger than what it rounds, a residual would grow"
    assert decision.notes == (note,)
    assert note in explain(decision, "", 0, 0, [], Drift(0.0)).splitlines()
