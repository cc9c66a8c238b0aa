"""The runs below a folder, each with a name of its own and the runs that it may be compared with."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError
from penstock.run_record import FILE_NAME, RunRecord, load_run


@dataclass(frozen=True, slots=True)
class FoundRun:
    """One run and where it was found."""

    name: str  # unique in the report
    path: str  # of its run.json, from the folder that was searched
    record: RunRecord

    @property
    def group(self) -> str:
        """What runs must share to be compared: the task, the workers, and where they ran."""
        record = self.record
        return f"{record.task}, {record.workers} workers, {record.engine}, {record.where}"


def find_runs(folder: Path) -> list[FoundRun]:
    """Read every run.json below `folder`, in the order of their paths; baselines first."""
    if not folder.is_dir():
        raise PenstockError(f"{folder} is not a folder; wanted the folder that `penstock train --out` wrote")
    paths = sorted(folder.rglob(FILE_NAME))
    if not paths:
        raise PenstockError(f"no {FILE_NAME} below {folder}; wanted the folder that `penstock train --out` wrote")
    records = [(os.path.relpath(path, folder), load_run(path)) for path in paths]
    taken = Counter(record.name for _, record in records)
    runs = [FoundRun(_unique(record.name, path, taken), path, record) for path, record in records]
    return sorted(runs, key=lambda run: (run.group, not is_stock(run.record)))


def _unique(name: str, path: str, taken: Counter[str]) -> str:
    return name if taken[name] == 1 else f"{name} ({os.path.dirname(path) or '.'})"


def is_stock(record: RunRecord) -> bool:
    """Say whether a run is torch's own wrapper, with nothing of ours."""
    return record.planner is None and record.codec is None and record.plan is None


def baselines(runs: Sequence[FoundRun], name: str | None) -> dict[str, FoundRun]:
    """Return the run that each group is compared with: the one called `name`, else stock DDP, else the first."""
    if name is not None and name not in [run.name for run in runs]:
        raise PenstockError(f"no run called {name!r}; wanted one of {', '.join(run.name for run in runs)}")
    chosen: dict[str, FoundRun] = {}
    for run in runs:
        if run.group not in chosen or run.name == name:
            chosen[run.group] = run
    return chosen
