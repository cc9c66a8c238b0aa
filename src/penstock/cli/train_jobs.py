"""From the options of `penstock train` to a job that can work: everything that can be refused is refused here."""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import TrainError, shorten
from penstock.network import load_network
from penstock.strategies import parse_strategy
from penstock.task_names import is_users, task_of_ours
from penstock.train.job import AUTO, GLOO, KEPT, MPI, STOCK, Job, find_checkpoint


def check_pairs(
    planner: str, stock: bool, compare: bool, steps: int | None, epochs: float, save: str, save_every: int
) -> None:
    """Refuse options that contradict each other, where one of them would be left out without a word."""
    if steps and epochs:
        raise TrainError(f"--steps {steps} and --epochs {epochs:g}: both say how long; leave out one")
    if stock and planner not in ("", "stock"):
        raise TrainError(f"--stock and --planner {planner}: both say who plans; leave out one")
    if compare and (stock or planner == "stock"):
        raise TrainError("--compare with stock DDP: found one way twice; name another to compare it with")
    if save_every and not save:
        raise TrainError(f"--save-every {save_every} without --save: wanted a folder for checkpoints, --save DIR")


def make_job(given: Mapping[str, Any]) -> Job:
    """Return the job; where it resumes another, what was not given is as it was there."""
    given = _with_servers(given)
    if "resume" not in given:
        return Job(**given)
    saved = find_checkpoint(given["resume"])
    before = asdict(saved.job)
    _check_code(given.get("task", ""), saved.job.task)
    for name in KEPT:
        if name in given and given[name] != before[name] and not (name == "task" and is_users(before[name])):
            option = "--" + name.replace("_", "-")
            raise TrainError(
                f"{option}: found {given[name]!r}, but the checkpoint was made with {before[name]!r}; "
                "leave the option out to go on"
            )
    if "workers" not in given and saved.job.workers > 2 * saved.world_size:  # the others would be servers
        raise TrainError(
            f"{saved.path}: {saved.job.workers} workers are not started because a checkpoint of {saved.world_size} "
            "says so; wanted --workers"
        )
    here = {"where": Job().where, "nic": ""}  # it may have been emulated hosts, and they are not these
    job = Job(**before | here | {"save": given["resume"]} | dict(given) | {"resume": str(saved.path)})
    if saved.step >= job.steps:
        raise TrainError(
            f"{saved.path}: training is at step {saved.step} of {job.steps} already; ask for more with --steps"
        )
    return job


def _with_servers(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options, a strategy whose last ranks only aggregate taken as `--servers`: those ranks do not train."""
    options = parse_strategy(given.get("strategy", AUTO))[1]
    if not options.get("dedicated"):
        return given
    if given.get("servers", options["servers"]) != options["servers"]:
        raise TrainError(f"--servers {given['servers']} and --strategy {given['strategy']}; leave out one of the two")
    return {name: value for name, value in given.items() if name != "strategy"} | {"servers": options["servers"]}


def _check_code(given: str, before: str) -> None:
    """Refuse to take a task's file from a checkpoint, which may be another user's: code comes from the command line."""
    if not is_users(before):
        return
    wanted = f"--task FILE.py:{before.rpartition(':')[2]}, with the file that it was made with"
    if not given:
        raise TrainError(
            f"the checkpoint was made with the task {shorten(before)}, a file that is not run because a checkpoint "
            f"says so; wanted {wanted}"
        )
    if _code_name(given) != _code_name(before):
        raise TrainError(f"--task: found {given!r}, but the checkpoint was made with {before!r}; wanted {wanted}")


def _code_name(task: str) -> str:
    """Return a task's file and function without the folder, which may be another one after a move."""
    return Path(task).name


def check_job(job: Job, rate: str) -> None:
    """Raise unless the job can work here; no worker has been started."""
    job.check()
    if job.engine == MPI:
        _check_mpi()
    _check_task(job.task)
    _check_codec(job)
    if job.network:
        load_network(job.network)
    if job.device == "cuda" and find_spec("torch") is not None:
        import torch

        if not torch.cuda.is_available():
            raise TrainError("--device cuda: torch sees no GPU here; choose --device cpu")
    if rate:
        _check_rate(job.workers, rate)


def _check_task(name: str) -> None:
    ours = task_of_ours(name)
    if find_spec("torch") is None:
        raise TrainError("training needs torch, which is not here; `pip install 'penstock[torch]'`")
    if ours == "digits" and find_spec("sklearn") is None:
        raise TrainError("task 'digits' needs scikit-learn, which is not here; `pip install 'penstock[digits]'`")
    if not ours:  # a user's file is imported, and its function called, to see that it works
        from penstock.zoo import find_task

        find_task(name)


def _check_codec(job: Job) -> None:
    if job.codec:
        from penstock.planning.planning import check_options

        check_options(job.planner, job.all_reduce)
        job.compression.scheme().check_strategy(job.all_reduce)


def _check_mpi() -> None:
    from penstock.cli.worker_processes import is_worker
    from penstock.cluster.building import run_command
    from penstock.cluster.worker_commands import find_mpirun
    from penstock.runtime.launch import torchrun_variables

    if find_spec("mpi4py") is None:
        raise TrainError("--engine mpi needs mpi4py, which is not here; `pip install 'penstock[mpi]'`")
    if not is_worker() and not torchrun_variables(os.environ):  # else workers are there already
        find_mpirun(run_command)


def _check_rate(workers: int, rate: str) -> None:
    import sys

    from penstock.cluster.building import require_tools
    from penstock.cluster.topology import parse_rates

    parse_rates(rate, workers)
    require_tools(sys.platform, os.geteuid())


def with_epochs(job: Job, epochs: float) -> Job:
    """Return the job with as many steps as so many passes over the training data take."""
    from penstock.zoo import find_task

    task = find_task(job.task)
    together = (job.batch or task.batch) * job.accumulate * (job.workers - job.servers)
    return replace(job, steps=max(1, round(epochs * task.samples / together)))


def stock_of(job: Job) -> Job:
    """Return the same training with torch's own wrapper."""
    return replace(
        job,
        planner=STOCK,
        strategy="auto",
        codec="",
        density=0.0,
        warmup="",
        warmup_every=0,
        dense_below=0,
        servers=0,
        engine=GLOO,
        save="",
        resume="",
        name="",
    )
