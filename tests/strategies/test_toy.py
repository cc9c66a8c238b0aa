"""A new strategy is one record: proved, timed, run and planned without a word about it anywhere else."""

import numpy as np
import pytest

from penstock.cost.ways import way_for
from penstock.curves import CodecCurves, Curve
from penstock.network import Network
from penstock.planners import PLANNERS
from penstock.program import DATA, Collective, Part, Slice
from penstock.program.builder import PartBuilder
from penstock.runtime import Communicator
from penstock.runtime.transport.memory import MemoryTransport
from penstock.simulator.fitted import fitted_cost
from penstock.simulator.iteration import predict
from penstock.simulator.program import simulate_program
from penstock.strategies import STRATEGIES, Options, Strategy, build, build_compressed, names
from penstock.strategies.compress import compressed
from penstock.traces import load_shipped
from penstock.verify import require_proof
from runtime.programs import Halves
from runtime.threads import run_ranks

NUMEL = 5000


def star(rank: int, world_size: int, numel: int, options: Options) -> Part:
    """Sum on rank 0, in the order of the ranks, and send the sum to each of them."""
    builder = PartBuilder("star", Collective.ALL_REDUCE, rank, world_size, numel)
    data = Slice(DATA, 0, numel)
    builder.units = [data] if numel else []
    others = range(1, world_size) if rank == 0 else [rank]
    for other in others:
        arrived = Slice(f"from{other}", 0, numel)
        if rank == 0:
            builder.scratch(arrived.buffer, numel)
        builder.message(other, 0, data, arrived)
        if rank == 0:
            builder.merge(data, arrived)
    for other in others:
        builder.message(0, other, data, data)
    return builder.build()


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "star", Strategy("star", {Collective.ALL_REDUCE: star}, coded=compressed(star)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_it_is_proved_dense_and_compressed(world_size):
    assert "star" in names("all_reduce")
    assert require_proof(build("all_reduce", "star", world_size, NUMEL)).proved
    assert require_proof(build_compressed("star", world_size, (0, 3000, NUMEL))[0]).proved


def test_it_is_timed():
    network = Network(4, 1.0, 0.0, 0.0)
    assert simulate_program(build("all_reduce", "star", 4, NUMEL), network).seconds == 6.0  # 3 in, one by one, 3 out


@pytest.mark.parametrize("codec", [None, Halves()])
def test_it_runs(codec):
    def rank(transport: MemoryTransport) -> np.ndarray:
        values = np.full(NUMEL, transport.rank + 1, np.float32)
        Communicator(transport).all_reduce(values, "star", codec)
        return values

    for values in run_ranks(4, rank):
        assert (values == 10).all()


def test_it_is_planned_dense_and_compressed():
    curves = CodecCurves(0.1, Curve(1e-10, 1e-6), Curve(1e-10, 1e-6))
    network = Network(4, 5e-5, 1e-9, 0.0, codecs={"c": curves})
    trace = load_shipped("resnet50")
    for workers in (4, 2048):
        ways = [way_for(network, route, workers, fitted_cost) for route in ("star", "star+c")]
        assert [way.source for way in ways] == ["simulated", "simulated"]
        plan = predict(trace, PLANNERS["joint"], ways, workers)
        assert sum(len(bucket.tensors) for bucket in plan.buckets) == len(trace.tensors)
    dense = way_for(network, "star", 4, fitted_cost)
    assert dense.seconds(16e6) == pytest.approx(6 * (5e-5 + 0.016), rel=0.01)
