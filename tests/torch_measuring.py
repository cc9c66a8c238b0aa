"""What each process of a test does that measures: the network, timelines, and communication that drifts."""

import itertools
import os
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import FitError
from penstock.network import LinearCost, Network
from penstock.plan import Route
from penstock.torch import DistributedDataParallel as OurDDP
from penstock.torch import measure as measuring
from penstock.torch.device_measure import measure_device_network
from torch_training import _loss, plain, quick


def drift_away(rank: int) -> tuple[str, str, str, bool]:
    """Plan for a network where startups take a second, and let the wrapper find out that they do not."""
    lines = {"native": LinearCost(1.0, 1e-9)}
    wrapper = OurDDP(
        plain(),
        strategy="native",
        network=Network(2, 1.0, 1e-9, 1e-10, lines),
        profile_iterations=2,
        replan_drift=0.5,
    )
    hashes = []
    wrapper._conductor._measure = lambda: Network(2, 0.0, 1e-6, 1e-10, {"native": LinearCost(0.0, 1e-6)})
    for step in range(26):
        _loss(wrapper, rank, step, {}).backward()
        hashes.append(wrapper.plan.hash if wrapper.plan else "")
    weights = next(wrapper.parameters()).detach().clone()
    mine = weights.clone()
    dist.broadcast(weights, 0)
    return hashes[4], hashes[-1], wrapper.explain(), torch.equal(mine, weights)


def timelines(rank: int) -> tuple[Any, Any, list[str]]:
    """Return the measured timelines of a wrapper that uses the engine and of one that uses a ring."""
    found, planned = [], []
    for strategy in ("native", "ring"):
        wrapper = OurDDP(plain(), strategy=strategy, planner="wfbp", **quick())
        assert wrapper.measured_timeline() is None
        for step in range(7):
            _loss(wrapper, rank, step, {}).backward()
        found.append(wrapper.measured_timeline())
        assert "measured compute " in wrapper.explain(picture=True)
        assert "predicted network " in wrapper.explain(picture=True)
        planned = [bucket.name for bucket in wrapper.plan.buckets]
    return found[0], found[1], planned


def measure_twice(rank: int, folder: str) -> tuple[Network, Network, Network, int]:
    """Measure into a folder, again, and with one more line; return the networks and how many files there are.

    What is measured is made up: each time it is another network.
    """
    count = itertools.count(1)
    measuring._measure = lambda _group, routes, *_: Network(
        2, next(count), 1e-9, 1e-10, {str(route): LinearCost(1e-4, 1e-9) for route in routes}
    )
    group, cpu, routes = dist.group.WORLD, torch.device("cpu"), [Route("native")]
    first, again = (measuring.measure(group, routes, cpu, folder) for _ in range(2))
    another = measuring.measure(group, [*routes, Route("ring")], cpu, folder)
    dist.barrier()
    return first, again, another, len(os.listdir(folder))


def measure_on_device(rank: int) -> Network:
    """Measure as with NCCL, on the device that is there; again where a busy machine spoils it, on all ranks alike."""
    for _ in range(5):
        with suppress(FitError):
            return measure_device_network(dist.group.WORLD, torch.device("cpu"), seconds=1.0)
    raise AssertionError("five measurements in a row could not be fitted")
