"""The command line of each worker on its host: with `torchrun`'s environment, or started by Open MPI's `mpirun`.

On emulated hosts `mpirun` runs on the first and reaches the others as it would reach real ones, through a remote shell;
ours is a four-line script that enters a namespace instead of a network connection. Messages go over TCP on the hosts'
NICs, never through shared memory, because each host carries a name of its own.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.cluster.building import NIC, Runner, run_command
from penstock.cluster.gpus import SharedGpu
from penstock.cluster.processes import Forward, Outcome, Sink, Worker, free_port, run_workers
from penstock.cluster.topology import Host, Layout, namespace_path
from penstock.errors import ClusterError

MASTER_PORT = 29500  # always free: the host's ports are its own
# Run by sh in a mount and a host name space of its own, so that name, /etc/hosts and the NICs in /sys change for this
# worker alone. A container that may not mount /sys shows its own NICs there.
AS_HOST = (
    'mount -t sysfs sysfs /sys 2> /dev/null; echo "$0" > /proc/sys/kernel/hostname; mount --bind "$1" /etc/hosts; '
    'shift; exec "$@"'
)


def plan_workers(
    layout: Layout,
    hosts_file: Path,
    command: Sequence[str],
    per_host: int = 1,
    extra: Mapping[str, str] | None = None,
    gpu: SharedGpu | None = None,
) -> list[Worker]:
    """Return one worker per rank; ranks of a host are consecutive."""
    workers = []
    for host in layout.hosts:
        for local_rank in range(per_host):
            environment = rank_environment(layout, host, local_rank, per_host, gpu) | dict(extra or {})
            settings = [f"{name}={value}" for name, value in environment.items()]
            argv = [*enter_host(host.namespace, hosts_file), "env", *settings, *command]
            workers.append(Worker(host.index * per_host + local_rank, tuple(argv)))
    return workers


def enter_host(namespace: str, hosts_file: Path) -> tuple[str, ...]:
    """Return the command that runs what follows it on a host, under the host's own name."""
    own = ("unshare", "--uts", "--mount", "--propagation", "slave", "--")
    return ("nsenter", f"--net={namespace_path(namespace)}", *own, "sh", "-c", AS_HOST, namespace, str(hosts_file))


def hosts_lines(layout: Layout) -> str:
    """Return an /etc/hosts that knows every host, so that names resolve without asking outside.

    Each address also in its IPv6 form: c10d looks up its peers that way, and warns where it finds nothing.
    """
    known = [("127.0.0.1", "localhost"), *((host.address, host.namespace) for host in layout.hosts)]
    return "".join(f"{address} {name}\n::ffff:{address} {name}\n" for address, name in known)


def rank_environment(
    layout: Layout, host: Host, local_rank: int, per_host: int, gpu: SharedGpu | None = None
) -> dict[str, str]:
    """Return `torchrun`'s variables for one worker, and those of a shared GPU."""
    rank = host.index * per_host + local_rank
    environment = common_environment(layout) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(host.index),
        "WORLD_SIZE": str(len(layout.hosts) * per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
    }
    return environment if gpu is None else environment | gpu.environment(layout.slot, rank)


def common_environment(layout: Layout) -> dict[str, str]:
    """Return the variables that are the same for every worker.

    One compute thread per worker, because the hosts share this machine's cores; `--env OMP_NUM_THREADS=4` overrides.
    """
    return {
        "GROUP_WORLD_SIZE": str(len(layout.hosts)),
        "MASTER_ADDR": layout.hosts[0].address,
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": NIC,
        "NCCL_SOCKET_IFNAME": NIC,
        "NCCL_IB_DISABLE": "1",  # InfiniBand of this machine would pass by the emulated links
        "TP_SOCKET_IFNAME": NIC,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # output goes through a pipe and should still appear line by line
        "PENSTOCK_CLUSTER_SLOT": str(layout.slot),
    }


# Open MPI's TCP listens on all interfaces, whichever it is told to use.
ON_ONE_MACHINE = {"OMPI_MCA_btl": "sm,self"}


def loopback_meeting() -> dict[str, str]:
    """Return where workers of this machine form their group: at a port that is free now."""
    interface = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # else others can reach what listens
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | interface


def loopback_workers(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> list[Worker]:
    """Return a worker on this machine for each command, with `torchrun`'s variables beside `environment`."""
    sizes = {"WORLD_SIZE": str(len(commands)), "LOCAL_WORLD_SIZE": str(len(commands))}
    common = [f"{name}={value}" for name, value in (dict(environment) | loopback_meeting() | sizes).items()]
    return [
        Worker(rank, ("env", *common, f"RANK={rank}", f"LOCAL_RANK={rank}", *command))
        for rank, command in enumerate(commands)
    ]


def mpirun_workers(ranks: int, command: Sequence[str], environment: Mapping[str, str]) -> list[Worker]:
    """Return the plain `mpirun` that starts a command on this machine, so many times."""
    settings = ("env", *(f"{name}={value}" for name, value in (ON_ONE_MACHINE | dict(environment)).items()))
    launch = (find_mpirun(run_command), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
    return [Worker(0, (*launch, "-n", str(ranks), *settings, *command))]


AGENT, FAILURES = "agent", "failures"  # files in the scratch directory of a run
LEAST_MAJOR = 5  # older ones name their remote shell and their output tags otherwise
# Open MPI's names for torchrun's variables, so that the same script runs under both. mpirun passes SIGUSR1 on to all
# processes of a rank: this shell, which lives as long as its child, must not die of it.
TORCHRUN_VARIABLES = (
    "trap : USR1; export RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK "
    "WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE "
    "GROUP_RANK=$((OMPI_COMM_WORLD_RANK / OMPI_COMM_WORLD_LOCAL_SIZE)); "
)
RUN_AND_NOTE = '"$@"; code=$?; [ $code = 0 ] || echo $code $RANK >> "$PENSTOCK_FAILURES"; exit $code'
TAG = re.compile(r"\[\d+,(\d+)\]<(stdout|stderr)>: ?(.*)", re.DOTALL)
HARMLESS = "plm:ssh: Warning: setpgid"  # mpirun names its child's group after the child has already done so


def find_mpirun(runner: Runner, beside: Path | None = None) -> str:
    """Return the path of Open MPI's `mpirun`: the one of this Python's environment, else the one on PATH."""
    own = (beside or Path(sys.executable).parent) / "mpirun"
    found = str(own) if own.exists() else shutil.which("mpirun")
    if found is None:
        raise ClusterError("engine mpi needs Open MPI's mpirun and found none; `pip install 'penstock[mpi]'`")
    _, output, _ = runner((found, "--version"))
    version = re.search(r"\(Open MPI\) (\d+)\.", output)
    if version is None or int(version[1]) < LEAST_MAJOR:
        said = output.strip().splitlines()[0] if output.strip() else "nothing"
        raise ClusterError(
            f"{found} says {said}; wanted Open MPI {LEAST_MAJOR} or newer, `pip install 'penstock[mpi]'`"
        )
    return found


def plan_mpirun(
    layout: Layout,
    hosts_file: Path,
    scratch: Path,
    mpirun: str,
    command: Sequence[str],
    per_host: int = 1,
    extra: Mapping[str, str] | None = None,
    gpu: SharedGpu | None = None,
) -> Worker:
    """Return the one process to start: `mpirun` on the first host, which starts the ranks on all."""
    environment = common_environment(layout) | mpi_environment(scratch) | dict(extra or {})
    hosts = ",".join(f"{host.namespace}:{per_host}" for host in layout.hosts)
    placed = ("--host", hosts, "--map-by", "slot")
    exports = _gpu_variables(layout.slot, gpu, extra or {})
    launch = _mpirun(mpirun, len(layout.hosts) * per_host, placed, command, environment, exports)
    return Worker(0, (*enter_host(layout.hosts[0].namespace, hosts_file), *launch))


def plan_local_mpirun(
    workers: int, scratch: Path, mpirun: str, command: Sequence[str], extra: Mapping[str, str]
) -> Worker:
    """Return the one process to start: `mpirun`, which starts all ranks on this host; they talk by shared memory."""
    environment = common_settings(scratch) | ON_ONE_MACHINE | dict(extra)
    return Worker(0, _mpirun(mpirun, workers, ("--map-by", "slot:OVERSUBSCRIBE"), command, environment))


def _gpu_variables(slot: int, gpu: SharedGpu | None, extra: Mapping[str, str]) -> str:
    """Return what a rank's shell exports beside torchrun's variables; what the user gives (`extra`) stands."""
    if gpu is None:
        return ""
    variables = gpu.environment(slot, "$RANK").items()
    return "".join(f'export {name}="{value}"; ' for name, value in variables if name not in extra)


def _mpirun(
    mpirun: str,
    ranks: int,
    placed: Sequence[str],
    command: Sequence[str],
    environment: Mapping[str, str],
    exports: str = "",
) -> tuple[str, ...]:
    shell = TORCHRUN_VARIABLES + exports + RUN_AND_NOTE
    settings = [f"{name}={value}" for name, value in environment.items()]
    launch = ("env", *settings, mpirun, "--allow-run-as-root", *placed, "-n", str(ranks))
    return (*launch, "--bind-to", "none", "--output", "tag", "sh", "-c", shell, "sh", *command)


def mpi_environment(scratch: Path) -> dict[str, str]:
    """Return Open MPI's settings on emulated hosts: our remote shell, and TCP over the NIC only."""
    return common_settings(scratch) | {
        "PRTE_MCA_plm_ssh_agent": str(scratch / AGENT),
        "PRTE_MCA_prte_if_include": NIC,
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_MCA_btl_tcp_if_include": NIC,
    }


def common_settings(scratch: Path) -> dict[str, str]:
    """Return Open MPI's settings on any hosts; `scratch` is a directory that goes when the run ends."""
    return {
        "PRTE_MCA_prte_silence_shared_fs": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # more ranks than cores: a waiting rank must let others run
        "TMPDIR": str(scratch),
        "PENSTOCK_FAILURES": str(scratch / FAILURES),
        "TERM": "dumb",  # mpirun gives every rank a terminal, whose colours would end up in pipes and files
        "COLUMNS": "160",
    }


def write_agent(scratch: Path, hosts_file: Path) -> None:
    """Write the remote shell: called as `agent HOST WORDS...`, it runs the words on HOST as a shell would."""
    agent = scratch / AGENT
    enter = shlex.join(enter_host("HOST", hosts_file)).replace("HOST", '"$host"')
    agent.write_text(f'#!/bin/sh\nhost=$1\nshift\nexec {enter} sh -c "$*"\n')
    agent.chmod(0o755)


def first_failure(failures: Path) -> tuple[int, int] | None:
    """Return exit code and rank of the first rank that failed, as the ranks' own shells have noted it.

    `mpirun` is not relied on: when a rank fails at once, about one in twelve times Open MPI 5.0 waits for ever.
    """
    try:
        words = failures.read_text().split()
    except FileNotFoundError:
        return None
    return (int(words[0]), int(words[1])) if len(words) >= 2 else None


def run_mpirun(
    launcher: Worker,
    scratch: Path,
    sink: Sink,
    grace_seconds: float,
    timeout_seconds: float | None = None,
    forward: Forward | None = None,
) -> Outcome:
    """Run what `plan_mpirun` or `plan_local_mpirun` returned; which rank failed, the ranks' own shells say."""
    report = partial(first_failure, scratch / FAILURES)
    outcome = run_workers([launcher], rank_output(sink), grace_seconds, timeout_seconds, report, forward)
    code, rank = report() or (outcome.exit_code, None)
    return replace(outcome, exit_code=code, failed_rank=rank)


def rank_output(sink: Sink) -> Sink:
    """Return a sink for `mpirun`'s output that hands each rank's lines to `sink` under the rank's number."""

    def take(_: int, stream: str, line: str) -> None:
        tagged = TAG.fullmatch(line)
        if tagged is not None:
            sink(int(tagged[1]), tagged[2], tagged[3])
        elif HARMLESS not in line:
            sink(0, stream, line)  # mpirun itself, which runs on the first host

    return take
