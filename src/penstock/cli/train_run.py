"""Runs one training job and shows it: starts its workers, or is one of them."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import typer

from penstock.errors import FormatError, PenstockError, WorkerError
from penstock.run_record import RunRecord

if TYPE_CHECKING:
    from penstock.train.events import Event
    from penstock.train.job import Job
    from penstock.train.view import View


PATIENCE_SECONDS = 3.0  # for other ranks to find out which one was lost


@dataclass(frozen=True, slots=True)
class Shown:
    """Where a job's events go."""

    json: bool
    out: str  # folder of run records, or ""
    tensorboard: str  # folder of TensorBoard events, or ""
    failures: list[PenstockError] = field(default_factory=list)  # to write what was asked for

    def raise_failures(self) -> None:
        """Raise what could not be written, once all that was found out has been shown."""
        for failure in self.failures:
            raise failure


def run(job: "Job", rate: str, threads: int, shown: Shown) -> RunRecord | None:
    """Run the job to its end and return its record; None on workers that have none."""
    from penstock.cli.worker_processes import is_worker
    from penstock.runtime.launch import torchrun_variables

    os.environ.update(torchrun_variables(os.environ))
    if is_worker():
        return _join(job, shown)
    return _start(job, rate, threads or max(1, (os.cpu_count() or 1) // job.workers), shown)


def _start(job: "Job", rate: str, threads: int, shown: Shown) -> RunRecord | None:
    from penstock.train.start_workers import run_job

    here = "shared memory" if job.engine == "mpi" else "loopback"
    where = f"{job.workers} emulated hosts at {rate}" if rate else f"{job.workers} workers on {here}"
    teller = Teller(f"{job.task}, {job.name or job.method}, {where}", shown)
    try:
        finished = run_job(job, rate, threads, teller)
    except WorkerError as error:
        teller.close()
        print(f"penstock: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    finally:
        teller.close()
    return teller.end(job, finished)


def _join(job: "Job", shown: Shown) -> RunRecord | None:
    """Be one of the workers that a launcher started; only rank 0 shows anything."""
    from penstock.train.events import STOPPED, Wish, drop_event
    from penstock.train.worker import process_group, work

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = (int(os.environ.get(name, 0)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    job = replace(job, workers=size, where="as launched")
    teller = Teller(f"{job.task}, {job.name or job.method}, {size} workers", shown) if rank == 0 else None
    wish = Wish().listen()
    with process_group(job.device, local_size or size, PATIENCE_SECONDS, job.servers):
        finished = work(job, teller or drop_event, wish, local_rank)
    if teller is not None:
        teller.close()
        return teller.end(job, finished)
    if not finished:
        raise typer.Exit(STOPPED)
    return None


class Teller:
    """Shows events, keeps the record, and writes it where it belongs."""

    def __init__(self, title: str, shown: Shown) -> None:
        from penstock.train.view import make_view

        self._shown, self._saved = shown, ""
        self._record: RunRecord | None = None
        self._views: list[View] = []
        if shown.tensorboard:
            from penstock.train.view import TensorBoard

            self._views.append(TensorBoard(shown.tensorboard))
        self._views.append(make_view(title, shown.json))

    def __call__(self, event: "Event") -> None:
        """Take an event."""
        if event.kind == "saved":
            self._saved = event.values["path"]
        if event.kind in ("done", "stopped"):
            self._keep(event)
        for view in self._views:
            view(event)

    def _keep(self, event: "Event") -> None:
        from penstock.fields import Fields
        from penstock.run_record import run_file, run_from_fields, save_run

        record = self._record = run_from_fields(Fields(event.values["record"], "the run"))
        if self._shown.out:
            try:
                save_run(record, run_file(self._shown.out, record.name))
            except FormatError as error:  # training is over, and its figures can still be shown
                self._shown.failures.append(error)

    def close(self) -> None:
        """Stop showing."""
        while self._views:
            self._views.pop().close()

    def end(self, job: "Job", finished: bool) -> RunRecord | None:
        """Return the record of a job that ran to its end; otherwise say where it can go on, and exit."""
        from penstock.train.events import STOPPED

        if finished:
            return self._record
        task = f" --task {job.task}" if ":" in job.task else ""  # code, which is not taken from a checkpoint
        go_on = f"; go on with `penstock train --resume {job.save}{task}`" if self._saved else "; nothing was saved"
        print(f"penstock: stopped{go_on}", file=sys.stderr)
        for failure in self._shown.failures:
            print(f"penstock: {failure}", file=sys.stderr)
        raise typer.Exit(STOPPED)


def print_runs(records: Sequence[RunRecord], json: bool) -> None:
    """Print the runs as a table, with speed-ups against the first where there are several."""
    if json or not records:
        return
    from penstock.cli.output import print_table

    rows = [_row(record, records[0]) for record in records]
    columns = ["method", records[0].metric_name, "iteration", "compute", "exposed", "sent", "speed-up"]
    note = f"{records[0].workers} workers, {records[0].where}"
    keep = slice(None) if len(records) > 1 else slice(-1)
    print_table(f"{records[0].task}, {len(records[0].steps)} steps", columns[keep], [row[keep] for row in rows], note)


def _row(record: RunRecord, first: RunRecord) -> list[object]:
    from penstock.cli.output import format_seconds
    from penstock.train.view import number

    seconds = [
        "-" if value is None else format_seconds(value)
        for value in (record.iteration_seconds, record.compute_seconds, record.exposed_seconds)
    ]
    metric = number(record.evaluations[-1].metric) if record.evaluations else "-"
    sent = "-" if record.bytes_per_iteration is None else f"{record.bytes_per_iteration / 1e6:.4g} MB"
    whole, whole_first = record.iteration_seconds, first.iteration_seconds
    return [record.name, metric, *seconds, sent, f"{whole_first / whole:.2f}x" if whole and whole_first else "-"]
