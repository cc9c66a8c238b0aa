"""`penstock doctor`: what works on this machine, and how to get what does not."""

from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli.options import JsonOption


def doctor(
    smoke_test: Annotated[bool, typer.Option(help="let two workers add up a vector over each engine")] = True,
    json: JsonOption = False,
) -> None:
    """Check versions, engines, GPUs, cores, emulated hosts and caches; exit with 1 where something is broken."""
    from penstock.cli.output import print_json, print_table, progress
    from penstock.doctor import State
    from penstock.doctor.checks import CHECKS, examine

    with progress("doctor", len(CHECKS) + smoke_test) as done:
        findings = examine(smoke_test, done)
    if json:
        print_json([asdict(finding) | {"state": finding.state.value} for finding in findings])
    else:
        rows = [(f.name, f.state.value, f.found) for f in findings]
        print_table("What works on this machine", ("what", "state", "found"), rows)
        for finding in findings:
            if finding.remedy:
                print(f"{finding.name} ({finding.state.value}): {finding.remedy}")
    raise typer.Exit(1 if any(finding.state is State.BROKEN for finding in findings) else 0)
