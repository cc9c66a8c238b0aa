"""Emulated hosts, and whether their ranks can share a GPU. They are tried, not guessed."""

import os
import sys
from collections.abc import Sequence

from penstock.cluster.emulate import emulated_cluster
from penstock.cluster.gpus import SHARED, SharedGpu
from penstock.cluster.sinks import Collected
from penstock.cluster.tools import require_tools
from penstock.doctor.finding import Finding, State, missing, works
from penstock.errors import ClusterError, PenstockError

HOSTS, GPU_HOSTS = "emulated hosts", "GPU hosts"
NEEDED = ("NCCL", HOSTS)  # the findings without which GPU hosts do not work
WITHOUT = "without it, workers of this machine talk over loopback: no rates, no hosts"
WITHOUT_GPU = "only for NCCL between ranks on one GPU: `penstock cluster run --gpus shared`"
TRY_SECONDS = 30.0


def check_hosts() -> list[Finding]:
    """Build two hosts at 1 Gb/s, run a command on each and take them down again."""
    try:
        require_tools(sys.platform, os.geteuid())
        try_hosts("none")
    except PenstockError as error:
        return [missing(HOSTS, str(error), WITHOUT)]
    return [works(HOSTS, "root, namespaces and token buckets over netlink: two hosts at 1 Gb/s were built")]


def check_gpu_hosts(findings: Sequence[Finding]) -> list[Finding]:
    """Say whether ranks on emulated hosts can share a GPU, from what was found before and by starting the service."""
    found = {finding.name: finding for finding in findings}
    for name in NEEDED:
        if name not in found or found[name].state is not State.WORKS:
            reason = found[name].found if name in found else "could not be looked at"
            return [missing(GPU_HOSTS, f"{name}: {reason}", WITHOUT_GPU)]
    service = try_hosts(SHARED)
    here = f"NCCL {found['NCCL'].found}"
    if service is not None and service.complaint:
        return [missing(GPU_HOSTS, f"{here}; {service.complaint}", "they work, slowly: the driver brings the service")]
    return [works(GPU_HOSTS, f"{here}; CUDA's multi-process service was started beside two hosts")]


def try_hosts(gpus: str) -> SharedGpu | None:
    """Run a command on two hosts; return how they share a GPU."""
    with emulated_cluster(2, "1gbit", gpus=gpus) as cluster:
        outcome = cluster.run(["true"], sink=Collected(), timeout_seconds=TRY_SECONDS)
    if outcome.exit_code != 0:
        raise ClusterError(f"a command on host {outcome.failed_rank} ended with exit code {outcome.exit_code}")
    return cluster.gpu
