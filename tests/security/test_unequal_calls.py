"""Ranks that average different numbers of times: every one ends in time, and none that lives is called dead."""

from contextlib import nullcontext
from datetime import timedelta
from itertools import product
from time import monotonic

import pytest
import torch
import torch.distributed as dist

from penstock.errors import TransportError
from penstock.plan import Bucket, Plan
from penstock.runtime.transport.c10d import C10dTransport
from penstock.torch import Checkpoints, DistributedDataParallel
from spawn import spawn_outcomes

TIMEOUT_SECONDS = 5.0  # of the process group
BUSY_SECONDS = 15.0  # beyond the timeout: 2 s for reading notes, and a machine with other work
STEPS, ODD_STEP = 12, 8
ROUTES = {"native": ("native", None), "ring+onebit": ("ring", "onebit"), "gtopk": ("gtopk", "sparse(density=0.05)")}
MAY_LIVE = "{} did not answer before the timeout: it died, hangs, has ended, or lives and makes fewer calls"
ENDED = "{} did not answer: it died, hangs, or has ended"


def train(rank, odd, route, what, afterwards, folder):
    """Train, `odd` with fewer batches or one in `no_sync`; return what was raised, and after how many seconds."""
    _steps(_wrapped(route, dist.group.WORLD), 2)  # kernels are compiled where all may wait for them
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_SECONDS))
    model, store = _wrapped(route, group), C10dTransport().store
    ends_sooner = rank == odd and what == "fewer batches"
    began = monotonic()
    try:
        _steps(model, ODD_STEP if ends_sooner else STEPS, unsynced=rank == odd and what == "no_sync")
        if rank == odd and afterwards == "saves":
            Checkpoints(folder, model, group).save(1)
    except TransportError as error:
        store.set(f"failed {rank}", "")
        return str(error), monotonic() - began
    if afterwards == "stays":
        others = [each for each in range(dist.get_world_size()) if each != odd]
        store.wait([f"failed {each}" for each in others], timedelta(seconds=100))
    return None, 0.0


def _wrapped(route, group):
    strategy, codec = ROUTES[route]
    bucket = Bucket(("1.bias", "1.weight", "0.bias", "0.weight"), 4 * 2 * (32 * 32 + 32), strategy, codec)
    module = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    return DistributedDataParallel(
        module,
        process_group=group,
        codec=codec and codec.replace("sparse", "gtopk"),
        plan=Plan("m", dist.get_world_size(), "hand", (bucket,)),
    )


def _steps(model, count, unsynced=False):
    """Train for as many steps, one of them in `no_sync`."""
    for step in range(count):
        with model.no_sync() if unsynced and step == ODD_STEP else nullcontext():
            model(torch.ones(2, 32)).sum().backward()


def every_route(*quick):
    """Give a test every route, number of ranks, and odd one of them; all but the `quick` ones are slow."""
    cases = [case for case in product(ROUTES, (2, 3), (0, 1, 2)) if case[2] < case[1]]
    slow = dict.fromkeys({*cases} - {*quick}, pytest.mark.slow)
    return pytest.mark.parametrize(
        ("route", "ranks", "odd"), [pytest.param(*case, marks=slow.get(case, ())) for case in cases]
    )


def ends_of(folder, route, ranks, odd, what, afterwards):
    """Return what each rank raised; all must have ended in time."""
    ended = spawn_outcomes(ranks, train, odd, route, what, afterwards, str(folder))
    for rank, outcome in enumerate(ended):
        assert isinstance(outcome.value, tuple), f"rank {rank}: {outcome.value!r}"
        assert outcome.value[1] < TIMEOUT_SECONDS + BUSY_SECONDS
    return {rank: outcome.value[0] for rank, outcome in enumerate(ended)}


@every_route(("native", 3, 2), ("gtopk", 2, 1))
def test_a_rank_that_lives_with_fewer_batches_is_not_called_dead(tmp_path, route, ranks, odd):
    said = ends_of(tmp_path, route, ranks, odd, "fewer batches", "stays")
    assert said.pop(odd) is None
    for each in said.values():
        assert MAY_LIVE.format(f"rank {odd}") in each


@every_route(("ring+onebit", 3, 0))
def test_a_rank_that_left_an_average_out_in_no_sync_is_not_called_dead(tmp_path, route, ranks, odd):
    said = ends_of(tmp_path, route, ranks, odd, "no_sync", "stays")
    assert said.pop(odd) is None
    for each in said.values():
        assert MAY_LIVE.format(f"rank {odd}") in each


@every_route(("gtopk", 2, 0))
def test_a_rank_that_came_to_its_end_sooner_is_said_to_have_ended_perhaps(tmp_path, route, ranks, odd):
    said = ends_of(tmp_path, route, ranks, odd, "fewer batches", "leaves")
    assert said.pop(odd) is None
    for each in said.values():
        assert each.endswith(ENDED.format(f"rank {odd}"))


@every_route(("ring+onebit", 3, 0))
def test_ranks_that_wait_for_one_another_in_different_steps_tell_which(tmp_path, route, ranks, odd):
    said = ends_of(tmp_path, route, ranks, odd, "fewer batches", "saves")
    assert "step writing a checkpoint: no message exchanged with the other ranks: " in said[odd]
    doing = "averaging a bucket" if route == "native" else f"all_reduce by {ROUTES[route][0]} of "
    assert f"; all ranks live, rank {0 if odd else 1} in {doing}" in said.pop(odd)
    for each in said.values():
        assert f"; all ranks live, rank {odd} in writing a checkpoint: some may make more or fewer calls" in each
