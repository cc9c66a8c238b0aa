"""`make bench` calls every benchmark, with options it has."""

import importlib

import pytest
import typer

import run_all
from penstock.cli.main import bench

RUNS = run_all.RUNS + run_all.LONGER
VERBS = typer.main.get_command(bench).commands
NEEDS_A_GPU = {"overlap"}


def options_of(name: str) -> set[str]:
    """Return the options of a verb of `penstock bench`, or of a script, whose study has its name but for one."""
    if run_all.command_of(name)[0] == "-m":
        parameters = VERBS[name].params
    else:
        module = importlib.import_module(name)
        app = typer.Typer()
        app.command()(module.compare_joint if name == "joint" else vars(module)[name])
        parameters = typer.main.get_command(app).params
    return {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize(("name", "record", "options"), RUNS, ids=lambda x: str(x))
def test_every_benchmark_is_called_with_options_it_has(name, record, options):
    assert {word for word in options.split() if word.startswith("--")} | {"--out"} <= options_of(name)


def test_every_verb_that_measures_and_every_study_is_run():
    folder = run_all.FOLDER
    studies = {path.stem for path in folder.glob("*.py") if "    start(" in path.read_text()} - {"page"}
    assert (set(VERBS) | studies) - NEEDS_A_GPU <= {name for name, _, _ in RUNS}


def test_no_two_runs_share_a_record():
    records = [record for _, record, _ in RUNS]
    assert len(set(records)) == len(records)
