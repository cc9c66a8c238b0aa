"""NCCL between ranks that share a GPU on emulated hosts: what is run and checked, with pytest or as a script.

PYTHONPATH=src python tests/gpu_hosts.py               all cases on the GPU, a line each; the exit code counts failures
PYTHONPATH=src python tests/gpu_hosts.py --only=queued  those with this word in their name
PYTHONPATH=src python tests/gpu_hosts.py --cpu         the same over gloo, to try the script itself
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.cluster import EmulatedCluster, emulated_cluster
from penstock.cluster.processes import Collected, sent_nbytes
from penstock.cluster.topology import parse_rate
from penstock.runtime.hosts import this_host

TIMEOUT_SECONDS = 150.0
CREDIT = 0.9  # of the time that a rate allows: buckets pass 5% more for a moment, and 2 ms at once


@dataclass(frozen=True)
class Case:
    """An all-reduce on some hosts."""

    hosts: int
    rate: str
    per_host: int = 1
    numel: int = 4_000_000  # of float32

    @property
    def nbytes(self) -> int:
        return 4 * self.numel

    def __str__(self) -> str:
        return f"{self.hosts} x {self.per_host} ranks at {self.rate}"


CASES = (
    Case(2, "1gbit"),
    Case(4, "1gbit"),
    Case(2, "10gbit", numel=16_000_000),
    Case(4, "10gbit", numel=16_000_000),
    Case(2, "10gbit", per_host=2, numel=16_000_000),
)


# What each rank does.


def be_a_rank(device_name: str, numel: int) -> dict[str, Any]:
    """All-reduce random and whole numbers, pass a block on around the ring; return what came of it."""
    import torch
    import torch.distributed as dist

    from penstock.planning.agree import nodes_of
    from penstock.torch.collective_errors import GroupRanks

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(device_name, int(os.environ["LOCAL_RANK"]) if device_name == "cuda" else None)
    if device_name == "cuda":
        torch.cuda.set_device(device)  # as training scripts do
    dist.init_process_group("nccl" if device_name == "cuda" else "gloo")
    wait = torch.cuda.synchronize if device_name == "cuda" else (lambda: None)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(device)
    dist.all_reduce(torch.ones(1000, device=device))  # connects
    wait()
    dist.barrier()
    sent, started = sent_nbytes("eth0"), time.perf_counter()
    dist.all_reduce(values)
    wait()
    seconds = time.perf_counter() - started
    dist.barrier()
    sent = sent_nbytes("eth0") - sent
    steps = torch.arange(numel, device=device, dtype=torch.float32) % 1000
    whole = steps * (rank + 1)
    dist.all_reduce(whole)
    passed_on = torch.empty(1000, device=device)
    block = torch.full((1000,), float(rank), device=device)
    sends = [dist.P2POp(dist.isend, block, (rank + 1) % size), dist.P2POp(dist.irecv, passed_on, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    assert dist.group.WORLD is not None
    result = {
        "digest": hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest(),
        "exact": torch.equal(whole, steps * (size * (size + 1) // 2)),
        "passed_on": bool((passed_on == (rank - 1) % size).all()),
        "host": this_host(),
        "nodes": nodes_of(GroupRanks(dist.group.WORLD)),
        "host_id": os.environ.get("NCCL_HOSTID"),
        "sent_nbytes": sent,
        "seconds": seconds,
    }
    dist.barrier()
    dist.destroy_process_group()
    return result


def die_as_a_rank(device_name: str, numel: int) -> None:
    """Be killed in the middle of all-reduces, if this is rank 1."""
    import torch
    import torch.distributed as dist

    device = torch.device(device_name)
    dist.init_process_group("nccl" if device_name == "cuda" else "gloo")
    values = torch.ones(numel, device=device)
    for step in range(1000):
        dist.all_reduce(values)
        values[0].item()  # waits
        if step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


QUEUED_CASES = tuple(
    (codec, strategy)
    for codec in ("onebit", "blocks(bits=4)", "terngrad")
    for strategy in ("parameter_server", "ring", "hierarchical(ranks_per_node=2)")
)


def queue_buckets(device_name: str, numel: int) -> dict[str, Any]:
    """Average three buckets by the host, queued one after the other, and queued among one another; return digests."""
    import torch
    import torch.distributed as dist

    from penstock.codecs.graphs import urgent_stream
    from penstock.codecs.registry import make_codec
    from penstock.runtime import Communicator
    from penstock.runtime.device.messages import device_messages
    from penstock.runtime.transport.c10d import C10dTransport

    rank, device = int(os.environ["RANK"]), torch.device(device_name, 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    gloo, messages = dist.new_group(backend="gloo"), device_messages(dist.group.WORLD, 60.0)
    bounds = [[0, size // 7, size // 7, size - 100, size] for size in (numel, numel // 3 + 5, numel // 2 + 1)]

    def digest(codec_name: str, strategy: str, by_host: bool, lands: bool) -> str:
        codec = make_codec(codec_name, rank, defers_nonfinite_check=True)
        ranks = Communicator(C10dTransport(gloo), timeout_seconds=60, messages=messages)
        calls = [ranks.prepare_all_reduce(strategy, codec, parts, by_host=by_host) for parts in bounds]
        data, residuals = ([torch.zeros(parts[-1], device=device) for parts in bounds] for _ in range(2))
        for step in range(4):  # launched, captured, and twice replayed
            for number, (call, values, residual) in enumerate(zip(calls, data, residuals, strict=True)):
                seed = 100 * step + 10 * number + rank
                values.copy_(torch.randn(len(values), generator=torch.Generator().manual_seed(seed)))
                call.run(values, residual, 0.25, lands=lands)
            messages.land()
        torch.cuda.synchronize()
        return hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in (*data, *residuals))).hexdigest()

    with torch.cuda.stream(urgent_stream(device)):
        ways = ((True, True), (False, True), (False, False))
        found = {str(case): [digest(*case, *way) for way in ways] for case in QUEUED_CASES}
    dist.barrier()
    return {"rank": rank, "found": found}


ROLES: Mapping[str, Callable[[str, int], Any]] = {
    "rank": be_a_rank,
    "dying-rank": die_as_a_rank,
    "queued": queue_buckets,
}


# What is checked of them.


def command(role: str, device: str, numel: int) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), role, device, str(numel)]


def run_ranks(
    cluster: EmulatedCluster, device: str, per_host: int, numel: int, role: str = "rank"
) -> list[dict[str, Any]]:
    """Run the ranks; return their results in order, or fail with what they said."""
    seen = Collected()
    outcome = cluster.run(command(role, device, numel), per_host=per_host, sink=seen, timeout_seconds=TIMEOUT_SECONDS)
    said = seen.text(outcome.failed_rank or 0, "stderr")[-2000:]
    assert outcome.exit_code == 0, f"rank {outcome.failed_rank} ended with {outcome.exit_code}:\n{said}"
    ranks = range(len(cluster.layout.hosts) * per_host)
    return [json.loads(seen.text(rank).strip().splitlines()[-1]) for rank in ranks]


def check_all_reduce(case: Case, device: str) -> str:
    """Ranks end with equal bits and right sums, over the limited NICs and not faster than those; say how fast."""
    with emulated_cluster(case.hosts, case.rate, gpus="shared") as cluster:
        ranks = run_ranks(cluster, device, case.per_host, case.numel)
        service = cluster.gpu
    assert len({rank["digest"] for rank in ranks}) == 1, "ranks have different bits"
    assert all(rank["exact"] and rank["passed_on"] for rank in ranks)
    assert len({rank["host_id"] for rank in ranks}) == len(ranks)
    check_hosts_of(case, ranks)
    sent = [ranks[host * case.per_host]["sent_nbytes"] for host in range(case.hosts)]  # by each host's NIC
    assert sum(sent) >= 2 * (case.hosts - 1) * case.nbytes, (
        f"{sent} bytes left by the NICs: something else carries them"
    )
    seconds, rate = max(rank["seconds"] for rank in ranks), parse_rate(case.rate)
    assert rate is not None
    assert seconds >= CREDIT * 8 * max(sent) / rate, f"{max(sent)} bytes in {seconds} s: faster than {case.rate}"
    assert service is not None
    spent = f"{case.nbytes / 1e6:.0f} MB in {1e3 * seconds:.1f} ms, {sum(sent) / 1e6:.0f} MB sent"
    return f"{spent}; {service.complaint or 'with the multi-process service'}"


def check_hosts_of(case: Case, ranks: list[dict[str, Any]]) -> None:
    """Ranks of a host, and only those, are seen to share it, though NCCL takes each for a host of its own."""
    wanted = [list(range(first, first + case.per_host)) for first in range(0, len(ranks), case.per_host)]
    for nodes in (rank["nodes"] for rank in ranks):
        assert nodes == wanted
    assert [len({ranks[rank]["host"] for rank in node}) for node in wanted] == [1] * case.hosts
    assert len({rank["host"] for rank in ranks}) == case.hosts


def check_inside_a_host(device: str) -> str:
    """Two ranks of one host talk past its NIC: at 1 Mb/s, 16 MB would take minutes."""
    with emulated_cluster(1, "1mbit", gpus="shared") as cluster:
        ranks = run_ranks(cluster, device, 2, 4_000_000)
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert max(rank["sent_nbytes"] for rank in ranks) < 100_000, "messages inside the host left by its NIC"
    return f"16 MB in {1e3 * max(rank['seconds'] for rank in ranks):.1f} ms beside a NIC of 1 Mb/s"


def check_crash(device: str) -> str:
    """A killed rank ends the run; the hosts and the service take the next one, and are gone at the end."""
    with emulated_cluster(4, "10gbit", gpus="shared") as cluster:
        pipes = str(cluster.files / "mps")
        outcome = cluster.run(
            command("dying-rank", device, 4_000_000), sink=Collected(), grace_seconds=1, timeout_seconds=TIMEOUT_SECONDS
        )
        assert (outcome.exit_code, outcome.failed_rank) == (137, 1), outcome
        ranks = run_ranks(cluster, device, 1, 1_000_000)
        running = len(processes_with(pipes))
    assert len({rank["digest"] for rank in ranks}) == 1
    assert processes_with(pipes) == [], "processes of the multi-process service are left"
    assert not cluster.files.exists()
    return f"{running} processes of the service before, none after"


def check_queued(device: str) -> str:
    """Buckets queued among one another have the bits of each by itself, and of the route through the host."""
    if device == "cpu":
        return "not tried: nothing is queued in host memory"
    with emulated_cluster(4, "10gbit", gpus="shared") as cluster:
        ranks = run_ranks(cluster, device, 1, 1_500_000, "queued")
    for case in map(str, QUEUED_CASES):
        for number, rank in enumerate(ranks):
            assert len(set(rank["found"][case])) == 1, f"{case}: bits differ on rank {number}"
    return f"{len(QUEUED_CASES)} codecs and strategies"


def check_command_line(device: str) -> str:
    """`penstock cluster run --gpus shared` does the same."""
    if find_spec("typer") is None:
        return "not tried: typer is not installed"
    run = [sys.executable, "-m", "penstock", "cluster", "run", "--hosts", "2", "--rate", "10gbit"]
    gpus = ("--gpus", "shared") if device == "cuda" else ()
    line = [*run, *gpus, "--ranks-per-host", "2", "--", *command("rank", device, 1_000_000)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(one.split(" ", 1)[1]) for one in done.stdout.splitlines() if '"digest"' in one]
    assert len(found) == 4
    assert len({rank["digest"] for rank in found}) == 1
    return "4 ranks"


def processes_with(text: str) -> list[int]:
    """Return the processes that live and have `text` in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (entry / "environ").read_bytes():  # a zombie's is empty
                found.append(int(entry.name))
        except OSError:
            continue
    return found


CHECKS: dict[str, Callable[[str], str]] = {
    **{f"all-reduce, {case}": (lambda device, case=case: check_all_reduce(case, device)) for case in CASES},
    "two ranks inside a host": check_inside_a_host,
    "buckets that are queued": check_queued,
    "a rank is killed": check_crash,
    "the command line": check_command_line,
}


def run_checks(checks: dict[str, Callable[[str], str]], device: str) -> int:
    """Run checks, a line each; return how many failed."""
    failures = 0
    for name, check in checks.items():
        started = time.monotonic()
        try:
            said = f"ok      {check(device)}"
        except Exception as error:
            failures += 1
            said = f"FAILED  {type(error).__name__}: {error}"
        print(f"{name}: {said}  [{time.monotonic() - started:.0f} s]", flush=True)
    return failures


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(ROLES[sys.argv[1]](sys.argv[2], int(sys.argv[3]))), flush=True)
    else:
        words = [each.removeprefix("--only=") for each in sys.argv[1:] if each.startswith("--only=")]
        chosen = {name: check for name, check in CHECKS.items() if all(word in name for word in words)}
        sys.exit(run_checks(chosen, "cpu" if "--cpu" in sys.argv else "cuda"))
