"""What the ranks of the benchmarks' tests run: importable by name, so that spawned processes find it."""

import torch.distributed as dist

from penstock.bench.replay_worker import ReplayJob, measure_job
from penstock.bench.train_worker import TrainJob, train
from penstock.runtime.transport.c10d import C10dTransport


def train_on_loopback(_rank, methods):
    job = TrainJob("resnet20", 2, methods, rounds=2, iterations=1, warmup=2, profile=2, threads=1, nic="lo")
    finished = []
    rows = list(train(job, finished.append))
    dist.barrier()
    return rows, finished


def replay_on_loopback(_rank, traces):
    job = ReplayJob(traces, ("single", "exact"), 1, ("native", "ring"), 4000, 2)
    finished = []
    rows = list(measure_job(C10dTransport(), job, finished.append))
    dist.barrier()
    return rows, finished
