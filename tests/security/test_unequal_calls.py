"""Ranks that average different numbers of times: every one ends in time, and none that lives is called dead."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from time import monotonic

import pytest
import torch
import torch.distributed as dist

from penstock.errors import TransportError
from penstock.network import LinearCost, Network
from penstock.plan import Bucket, Plan
from penstock.runtime.transport.c10d import C10dTransport
from penstock.torch import BulkSynchronous, Checkpoints, DistributedDataParallel, ParameterServers
from spawn import spawn_outcomes

TESTS = Path(__file__).parents[1]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
TIMEOUT_SECONDS = 5.0  # of the process group
BUSY_SECONDS = 15.0  # beyond the timeout: 2 s for reading notes, and a machine with other work
STEPS, ODD_STEP = 12, 8
ROUTES = {"native": ("native", None), "ring+onebit": ("ring", "onebit"), "gtopk": ("gtopk", "sparse(density=0.05)")}
MAY_LIVE = "{} did not answer before the timeout: it died, hangs, has ended, or lives and makes fewer calls"
ENDED = "{} did not answer: it died, hangs, or has ended"


def train(rank, odd, route, what, afterwards, folder, engine=None):
    """Train, `odd` with fewer batches or one in `no_sync`; return what was raised, and after how many seconds."""
    _steps(_wrapped(route, dist.group.WORLD, engine), 2)  # kernels are compiled where all may wait for them
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_SECONDS))
    model, store = _wrapped(route, group, engine), C10dTransport().store
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


def train_served(rank, odd, what, afterwards):
    """Train beside a server, the last rank, as `train` does; rank 0 lets it end where it `leaves`."""
    servers, store = ParameterServers(1), C10dTransport().store
    began, is_odd = monotonic(), rank == odd
    try:
        if servers.is_server:
            servers.serve()
            return None, 0.0
        known = Network(3, 1e-4, 1e-9, 1e-10, {servers.strategy: LinearCost(1e-4, 1e-9)})
        model = DistributedDataParallel(torch.nn.Linear(32, 32), servers=servers, network=known, profile_iterations=2)
        _steps(model, 3)
        began = monotonic()
        _steps(model, ODD_STEP if is_odd and what == "fewer batches" else STEPS, is_odd and what == "no_sync")
        if afterwards == "leaves":
            servers.close()
    except TransportError as error:
        store.set(f"failed {rank}", "")
        return str(error), monotonic() - began
    if afterwards == "stays":
        store.wait([f"failed {each}" for each in {0, 1, 2} - {odd}], timedelta(seconds=100))
    return None, 0.0


def train_next_forward(rank, odd):
    """Train with updates that come in the next forward pass, `odd` with fewer batches; as `train` does."""
    model = BulkSynchronous(torch.nn.Linear(32, 32), partial(torch.optim.SGD, lr=0.1), algorithm="split")
    store, began = C10dTransport().store, monotonic()
    try:
        for _ in range(ODD_STEP if rank == odd else STEPS):
            began = monotonic()
            model(torch.ones(2, 32)).sum().backward()
            model.step()
    except TransportError as error:
        store.set(f"failed {rank}", "")
        return str(error), monotonic() - began
    others = {*range(dist.get_world_size())} - {odd}
    store.wait([f"failed {each}" for each in others], timedelta(seconds=100))
    return None, 0.0


def _wrapped(route, group, engine=None):
    strategy, codec = ROUTES[route]
    bucket = Bucket(("1.bias", "1.weight", "0.bias", "0.weight"), 4 * 2 * (32 * 32 + 32), strategy, codec)
    module = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    return DistributedDataParallel(
        module,
        process_group=group,
        engine=engine,
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


def said_by(odd, function, *arguments):
    """Return what all but the odd one of three ranks raised; they must have ended in time."""
    ended = spawn_outcomes(3, function, odd, *arguments, timeout=TIMEOUT_SECONDS)
    for rank, outcome in enumerate(ended):
        assert isinstance(outcome.value, tuple), f"rank {rank}: {outcome.value!r}"
        assert outcome.value[1] < TIMEOUT_SECONDS + BUSY_SECONDS or rank == 2
    assert ended[odd].value[0] is None
    return {rank: outcome.value[0] for rank, outcome in enumerate(ended) if rank != odd}


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        (0, "fewer batches"),
        pytest.param(1, "fewer batches", marks=pytest.mark.slow),
        pytest.param(0, "no_sync", marks=pytest.mark.slow),
        (1, "no_sync"),
    ],
)
def test_a_rank_that_lives_and_sends_servers_less_is_not_called_dead(odd, what):
    """Nor is the server, which waits for it as the others wait for the server."""
    for rank, each in said_by(odd, train_served, what, "stays").items():
        assert MAY_LIVE.format(f"rank {odd}") in each, f"rank {rank}"


def test_a_server_that_rank_0_let_end_is_not_blamed_by_workers_that_go_on():
    said = said_by(0, train_served, "fewer batches", "leaves")
    assert said == {1: said[1], 2: None}
    assert said[1].endswith(ENDED.format("rank 0"))


@pytest.mark.parametrize("odd", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_lives_with_fewer_batches_of_updates_in_the_next_forward_pass_is_not_called_dead(odd):
    for rank, each in said_by(odd, train_next_forward).items():
        assert MAY_LIVE.format(f"rank {odd}") in each, f"rank {rank}"


@pytest.mark.parametrize(
    ("route", "what"),
    [("ring+onebit", "no_sync"), pytest.param("native", "fewer batches", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("odd", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_over_mpi_a_rank_that_lives_and_makes_fewer_calls_is_not_called_dead(tmp_path, route, what, odd):
    pytest.importorskip("mpi4py")
    if MPIRUN is None:
        pytest.skip("no mpirun on PATH (pip install penstock[mpi])")
    command = [MPIRUN, "--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3"]
    command += [sys.executable, str(TESTS / "torch_mpi_unequal.py"), str(tmp_path / "store"), str(odd), route, what]
    paths = [str(TESTS), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": ":".join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    ended = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    said = {rank: each for rank, each, _ in ended}
    assert said.keys() == {0, 1, 2}, done.stdout + done.stderr
    assert max(seconds for *_, seconds in ended) < TIMEOUT_SECONDS + BUSY_SECONDS
    assert said.pop(odd) is None
    for each in said.values():
        assert MAY_LIVE.format(f"rank {odd}") in each
