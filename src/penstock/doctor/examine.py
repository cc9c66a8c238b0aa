"""Runs the checks in order and says what became of each."""

from collections.abc import Callable, Sequence

from penstock.doctor.engines import check_engines
from penstock.doctor.finding import Finding, State, broken
from penstock.doctor.hosts import check_gpu_hosts, check_hosts
from penstock.doctor.machine import check_caches, check_machine
from penstock.doctor.packages import check_packages
from penstock.doctor.smoke import check_smoke

Done = Callable[[str], None]  # told what was just checked, for progress
CHECKS: dict[str, Callable[[], list[Finding]]] = {
    "packages": check_packages,
    "machine": check_machine,
    "engines": check_engines,
    "hosts": check_hosts,
    "caches": check_caches,
}


def examine(smoke_test: bool = True, done: Done = lambda name: None) -> list[Finding]:
    """Return every finding; the smoke test runs over the engines that were found to work."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        findings += guarded(name, check)
        done(name)
    findings += guarded("GPU hosts", lambda: check_gpu_hosts(findings))
    if smoke_test:
        findings += guarded("smoke test", lambda: check_smoke(usable_engines(findings)))
        done("smoke test")
    return findings


def guarded(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Run one check; a check that fails itself is a finding too, and the others still run."""
    try:
        return check()
    except Exception as error:
        return [broken(name, f"{type(error).__name__}: {error}", "this is a mistake in penstock; please report it")]


def usable_engines(findings: Sequence[Finding]) -> list[str]:
    """Return the engines to try, of those that are there; NCCL needs a GPU per worker and is left to torch."""
    there = {finding.name for finding in findings if finding.state is State.WORKS}
    return [engine for name, engine in (("gloo", "gloo"), ("MPI", "mpi")) if name in there]
