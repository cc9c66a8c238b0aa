"""Finding checkpoints and reading what they say about themselves; needs no torch, so a launcher can look first."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import TrainError
from penstock.fields import Fields, read_json
from penstock.network import Network, network_document, network_from_fields
from penstock.plan import Plan, plan_document, plan_from_fields
from penstock.trace import Trace, trace_document, trace_from_fields
from penstock.train.job import Job, job_from_fields

FORMAT = "penstock-checkpoint/1"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint says about itself."""

    path: Path
    step: int  # iterations that were done
    seconds: float  # of training that they took
    world_size: int
    job: Job
    plan: Plan | None
    trace: Trace | None = None  # what the plan was made from, where it was
    network: Network | None = None


def saved_document(saved: Saved) -> dict[str, Any]:
    """Return what a checkpoint says about itself as a `penstock-checkpoint/1` document."""
    return {
        "format": FORMAT,
        "step": saved.step,
        "seconds": saved.seconds,
        "world_size": saved.world_size,
        "job": saved.job.document(),
        "plan": None if saved.plan is None else plan_document(saved.plan),
        "trace": None if saved.trace is None else trace_document(saved.trace),
        "network": None if saved.network is None else network_document(saved.network),
    }


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def find_checkpoint(folder: str) -> Saved:
    """Return the newest checkpoint in `folder`, or the one that `folder` is."""
    path = Path(folder)
    if not (path / "job.json").is_file():
        if not (complete := complete_checkpoints(path)):
            raise TrainError(f"{folder}: no checkpoint there; wanted a folder that `penstock train --save` wrote")
        path = complete[-1]
    return read_json(path / "job.json", FORMAT, lambda fields: _saved(path, fields))


def _saved(path: Path, fields: Fields) -> Saved:
    fields.reject_unknown(("format", "step", "seconds", "world_size", "job", "plan", "trace", "network"))
    job, plan, trace, network = (fields.optional_member(name) for name in ("job", "plan", "trace", "network"))
    if job is None:
        raise fields.error("job", "an object")
    return Saved(
        path,
        fields.integer("step", 0),
        fields.amount("seconds"),
        fields.integer("world_size", 1),
        job_from_fields(job),
        None if plan is None else plan_from_fields(plan),
        None if trace is None else trace_from_fields(trace),
        None if network is None else network_from_fields(network),
    )
