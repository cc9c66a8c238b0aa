"""What the ranks of the benchmarks' tests run: importable by name, so that spawned processes find it."""

import inspect

import torch.distributed as dist

from memory_worker import MemoryJob, measure_memory
from penstock.bench import replayed
from penstock.bench.replayed import ReplayJob, measure_job
from penstock.bench.training_worker import TrainJob, _prepare, start_up, train
from penstock.network import LinearCost, Network
from penstock.runtime.measure_network import Measurement
from penstock.runtime.transport.c10d import C10dTransport
from penstock.torch.wrapper_planning import WrapperPlanning
from penstock.zoo import find_task

LINE = LinearCost(1e-4, 1e-9)


def train_on_loopback(_rank, methods):
    job = TrainJob("resnet20", 2, methods, rounds=2, iterations=1, warmup=2, profile=2, threads=1, nic="lo")
    WrapperPlanning._survey = (
        _measured_group  # what is tested is the benchmark, on machines that are busy with other tests
    )
    finished = []
    rows = list(train(job, finished.append))
    dist.barrier()
    return rows, finished


def prepare_on_loopback(_rank, methods):
    """Return what each method has when its first round begins: its optimizer, its routes, and whether it warms up."""
    job = TrainJob("resnet20", 2, methods, rounds=1, iterations=1, warmup=2, profile=2, threads=1, nic="lo")
    WrapperPlanning._survey = _measured_group
    found = {}
    for name in methods:
        subject = _prepare(job, find_task(job.model), name, ())
        optimizer = inspect.getclosurevars(subject.trained.update).nonlocals["optimizer"]
        routes = {str(each.route) for each in subject.trained.model.plan.buckets}
        moments = getattr(optimizer, "_moments", None)
        found[name] = (type(optimizer).__name__, routes, moments and moments.is_warming_up)
    dist.barrier()
    return found


def start_on_loopback(_rank, method):
    WrapperPlanning._survey = _measured_group
    job = TrainJob("resnet20", 2, (method,), 0, 0, 0, profile=2, threads=1, nic="lo", startup=True)
    found = start_up(job)
    dist.barrier()
    return found


def _measured_group(self, _network):
    lines = {str(route): LINE for route in self._routes()}
    return Network(dist.get_world_size(self._group), 1e-5, 1e-9, 1e-10, lines), self._routes()


def _measured(transport, strategies=("native",), seconds=4.0):
    lines = dict.fromkeys(strategies, LINE)
    return Measurement(Network(transport.world_size, 1e-5, 1e-9, 1e-10, lines), {})


def replay_on_loopback(_rank, traces):
    job = ReplayJob(traces, ("single", "exact"), 1, ("native", "ring"), 4000, 2)
    replayed.measure_network = _measured
    finished = []
    rows = list(measure_job(C10dTransport(), job, finished.append))
    dist.barrier()
    return rows, finished


def delayed_replay_on_loopback(_rank, trace, latency_seconds):
    job = ReplayJob((trace,), ("single", "wfbp"), 1, latency_seconds=latency_seconds)
    replayed.measure_network = _measured
    rows = list(measure_job(C10dTransport(), job, lambda _: None))
    dist.barrier()
    return rows


def memory_on_loopback(_rank, method):
    row = measure_memory(MemoryJob("resnet20", 2, method, 2, 4))
    dist.barrier()
    return row
