"""Emulated hosts: root, the tools, network namespaces and token buckets. They are tried, not guessed."""

import os
import sys

from penstock.cluster.emulate import emulated_cluster
from penstock.cluster.sinks import Collected
from penstock.cluster.tools import require_tools
from penstock.doctor.finding import Finding, missing, works
from penstock.errors import ClusterError, PenstockError

WITHOUT = "without it, workers of this machine talk over loopback: no rates, no hosts"
TRY_SECONDS = 30.0


def check_hosts() -> list[Finding]:
    """Build two hosts at 1 Gb/s, run a command on each and take them down again."""
    try:
        require_tools(sys.platform, os.geteuid())
        with emulated_cluster(2, "1gbit") as cluster:
            outcome = cluster.run(["true"], sink=Collected(), timeout_seconds=TRY_SECONDS)
        if outcome.exit_code != 0:
            raise ClusterError(f"a command on host {outcome.failed_rank} ended with exit code {outcome.exit_code}")
    except PenstockError as error:
        return [missing("emulated hosts", str(error), WITHOUT)]
    return [works("emulated hosts", "root, ip, tc, namespaces and token buckets: two hosts at 1 Gb/s were built")]
