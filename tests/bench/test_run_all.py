import runpy
from pathlib import Path

import pytest
import typer

from penstock.cli.bench import bench

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "run_all.py"))
RUNS = SCRIPT["RUNS"] + SCRIPT["LONGER"]
VERBS = typer.main.get_command(bench).commands


@pytest.mark.parametrize(("verb", "record", "options"), [run for run in RUNS if run[0] in VERBS], ids=lambda x: str(x))
def test_every_benchmark_is_called_with_options_it_has(verb, record, options):
    known = {name for parameter in VERBS[verb].params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in options.split() if word.startswith("--")} | {"--out"} <= known


def test_every_verb_that_measures_is_run():
    needs_a_gpu = {"overlap"}
    assert set(VERBS) - {"page"} - needs_a_gpu <= {verb for verb, _, _ in RUNS}


def test_no_two_runs_share_a_record():
    records = [record for _, record, _ in RUNS]
    assert len(set(records)) == len(records)
