"""What the sliders of a report start from: a trace, the network as fitted, and the codecs as measured."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.curves import CodecCurves
from penstock.network import Network, network_document
from penstock.program import Collective
from penstock.report.found_runs import FoundRun
from penstock.report.run_plans import run_codecs
from penstock.strategies import STRATEGIES
from penstock.trace import trace_document


def closed_forms() -> list[str]:
    """Return the strategies of one level whose dense all-reduce is one line in closed form."""
    known = (one for one in STRATEGIES.values() if Collective.ALL_REDUCE in one.costs)
    return [one.name for one in known if one.stages is None and one.hands_to is None]


def what_if(runs: Sequence[FoundRun]) -> dict[str, Any]:
    """Return one entry per group of runs in which some run knows its trace and its network."""
    subjects: dict[str, FoundRun] = {}
    for run in runs:
        if run.record.trace is not None and run.record.network is not None:
            subjects.setdefault(run.group, run)
    return {"models": [_model(run, [other for other in runs if other.group == run.group]) for run in subjects.values()]}


def _model(run: FoundRun, group: Sequence[FoundRun]) -> dict[str, Any]:
    trace, network = run.record.trace, run.record.network
    assert trace is not None
    assert network is not None
    return {
        "label": f"{trace.label}, {run.group}",
        "workers": run.record.workers,
        "strategy": next((name for name in network.all_reduce if name in closed_forms()), "ring"),
        "trace": trace_document(trace),
        "network": network_document(_with_codecs(network, group)),
        "measured": _efficiencies(trace.compute_seconds, group),
    }


def _with_codecs(network: Network, group: Sequence[FoundRun]) -> Network:
    """Return the network with the curves of every codec that a run of the group measured."""
    found: dict[str, CodecCurves] = {}
    for run in group:
        found = run_codecs(run.record) | found
    return replace(network, codecs=found)


def _efficiencies(compute_seconds: float, group: Sequence[FoundRun]) -> list[dict[str, Any]]:
    """Return what each run reached: computation over iteration, which is speed-up over workers.

    The computation is that of the trace, as for the predicted curves: dots and curves can be compared. Each divided by
    its own, the run that was disturbed most would seem the most efficient.
    """
    return [
        {
            "name": run.name,
            "workers": run.record.workers,
            "efficiency": min(1.0, compute_seconds / run.record.iteration_seconds),
        }
        for run in group
        if run.record.iteration_seconds
    ]
