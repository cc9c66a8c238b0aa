"""What the sliders of a report start from: a trace, the network as fitted, and the codecs as measured."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.cost.collectives import ALL_REDUCE
from penstock.curves import CodecCurves
from penstock.network import Network, network_document
from penstock.report.found_runs import FoundRun
from penstock.report.run_codecs import run_codecs
from penstock.trace import trace_document


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
        "strategy": next((name for name in network.all_reduce if name in ALL_REDUCE), "ring"),
        "trace": trace_document(trace),
        "network": network_document(_with_codecs(network, group)),
        "measured": [point for other in group if (point := _efficiency(other)) is not None],
    }


def _with_codecs(network: Network, group: Sequence[FoundRun]) -> Network:
    """Return the network with the curves of every codec that a run of the group measured."""
    found: dict[str, CodecCurves] = {}
    for run in group:
        found = run_codecs(run.record) | found
    return replace(network, codecs=found)


def _efficiency(run: FoundRun) -> dict[str, Any] | None:
    """Return what a run reached: computation over iteration, which is speed-up over workers."""
    compute, iteration = run.record.compute_seconds, run.record.iteration_seconds
    if compute is None or not iteration:
        return None
    return {"name": run.name, "workers": run.record.workers, "efficiency": compute / iteration}
