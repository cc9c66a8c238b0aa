"""An emulated cluster for the length of a `with` block.

    with emulated_cluster(hosts=4, rate="1gbit") as cluster:
        outcome = cluster.run(["python", "train.py"])

Needs Linux and root. Two programs may do this at once; what a killed one left, the next one removes.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.cluster.building import (
    NIC,
    Bucket,
    Buckets,
    Kernel,
    LimitRate,
    SwitchLink,
    require_tools,
    run_command,
    setup_steps,
    smooth_bucket,
    this_kernel,
)
from penstock.cluster.gpus import GPUS, SHARED, SharedGpu, restart_service, start_service
from penstock.cluster.processes import Forward, Outcome, Sink, default_sink, run_workers, signals_unwind, signals_wait
from penstock.cluster.slots import Slot, claim, clean_dead_runs, kill_inside, processes_inside, remove_run
from penstock.cluster.topology import Layout, parse_rate, parse_rates, plan_layout
from penstock.cluster.worker_commands import (
    find_mpirun,
    hosts_lines,
    plan_mpirun,
    plan_workers,
    run_mpirun,
    write_agent,
)
from penstock.errors import ClusterError, shorten

ENGINES = ("gloo", "mpi")


@dataclass(frozen=True, slots=True)
class EmulatedCluster:
    """Hosts that exist now; `run` starts a program on all of them."""

    layout: Layout
    files: Path  # directory for what its runs write; it goes with the cluster
    gpu: SharedGpu | None = None  # None: ranks are not given one

    @property
    def hosts_file(self) -> Path:
        """An /etc/hosts with every host's name."""
        return self.files / "hosts"

    def run(
        self,
        command: Sequence[str],
        *,
        engine: str = "gloo",
        per_host: int = 1,
        environment: Mapping[str, str] | None = None,
        sink: Sink | None = None,
        grace_seconds: float = 5.0,
        timeout_seconds: float | None = None,
        forward: Forward | None = None,
    ) -> Outcome:
        """Run `command` once per worker with `torchrun`'s environment and wait for all.

        Engine `gloo` starts the workers here, as `torchrun` would; `mpi` leaves it to Open MPI's `mpirun`.
        `sink` takes every line a worker prints; by default they are printed here, with the rank before them. `forward`
        is asked several times a second for a signal that the workers are to get.
        """
        if engine not in ENGINES:
            raise ClusterError(f"engine {shorten(engine)}: wanted one of {', '.join(ENGINES)}")
        if per_host < 1:
            raise ClusterError(f"{per_host} workers per host: wanted at least 1")
        to = sink or default_sink(len(self.layout.hosts) * per_host)
        if engine == "gloo":
            workers = plan_workers(self.layout, self.hosts_file, command, per_host, environment, self.gpu)
            outcome = run_workers(workers, to, grace_seconds, timeout_seconds, forward=forward)
        else:
            outcome = self._run_mpi(command, per_host, environment, to, grace_seconds, timeout_seconds, forward)
        if outcome.exit_code != 0 and self.gpu is not None and self.gpu.files is not None:
            restart_service(self.files, self.layout.switch)
        return outcome

    def set_link(self, host: int, is_up: bool) -> None:
        """Pull a host's cable out of the switch, or put it back, while programs run."""
        this_kernel().build([SwitchLink(self.layout.switch, self.layout.hosts[host].port, is_up)])

    def set_rate(self, host: int, bucket: Bucket) -> None:
        """Give a host's link, in both directions, another rate while programs run; not a link without a limit."""
        ends = ((self.layout.hosts[host].namespace, NIC), (self.layout.switch, self.layout.hosts[host].port))
        this_kernel().build(LimitRate(namespace, interface, bucket, again=True) for namespace, interface in ends)

    def processes(self, host: int) -> set[int]:
        """Return the processes that run on a host now."""
        return processes_inside([self.layout.hosts[host].namespace])

    def _run_mpi(
        self,
        command: Sequence[str],
        per_host: int,
        environment: Mapping[str, str] | None,
        sink: Sink,
        grace_seconds: float,
        timeout_seconds: float | None,
        forward: Forward | None,
    ) -> Outcome:
        scratch = Path(tempfile.mkdtemp(prefix="mpi-", dir=self.files))
        write_agent(scratch, self.hosts_file)
        mpirun = find_mpirun(run_command)
        launcher = plan_mpirun(self.layout, self.hosts_file, scratch, mpirun, command, per_host, environment, self.gpu)
        outcome = Outcome(1, None, 0.0)
        try:
            outcome = run_mpirun(launcher, scratch, sink, grace_seconds, timeout_seconds, forward)
        finally:
            if outcome.exit_code != 0:  # mpirun may have left daemons and ranks on other hosts
                kill_inside(host.namespace for host in self.layout.hosts)
        return outcome


@contextlib.contextmanager
def emulated_cluster(
    hosts: int,
    rate: str = "1gbit",
    *,
    uplink: str | None = None,
    racks: int | None = None,
    gpus: str = "none",
    bucket: Buckets = smooth_bucket,
) -> Iterator[EmulatedCluster]:
    """Build hosts and links, and remove them however the block ends.

    `rate` is each NIC's, in both directions: one for all (`1gbit`), or one per host (`1gbit,1gbit,100mbit`), or `none`.
    With `uplink`, the hosts stand in `racks` racks (2 where not given), each joined to a core switch at that rate.
    With `gpus="shared"` all ranks are on one GPU, each a host of its own to NCCL; `cluster.gpu` says how they share it.
    `bucket` makes the token buckets of a rate.
    """
    require_tools(sys.platform, os.geteuid())
    rack_count = racks if racks is not None else (1 if uplink is None else 2)
    uplink_bits_per_second = None if uplink is None else parse_rate(uplink)
    rates = parse_rates(rate, hosts)
    plan_layout(0, rates, rack_count, uplink_bits_per_second)  # complain before anything is made
    if gpus not in GPUS:
        raise ClusterError(f"gpus {shorten(gpus)}: wanted one of {', '.join(GPUS)}")
    machine = this_kernel()
    with signals_unwind(), contextlib.ExitStack() as stack:
        with signals_wait():
            clean_dead_runs(machine)
            slot = claim()
            stack.callback(_tear_down, slot, machine)
            layout = plan_layout(slot.index, rates, rack_count, uplink_bits_per_second)
            cluster = EmulatedCluster(layout, slot.files)
            slot.note(hosts=len(layout.hosts))
            cluster.files.mkdir(exist_ok=True)
            cluster.hosts_file.write_text(hosts_lines(layout))
            machine.build(setup_steps(layout, bucket))
            if gpus == SHARED:
                cluster = replace(cluster, gpu=start_service(cluster.files, layout.switch))
        yield cluster


def _tear_down(slot: Slot, kernel: Kernel) -> None:
    with signals_wait():
        remove_run(slot, kernel)
