import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from penstock.bench import jobs
from penstock.bench.jobs import PREFIX, Output, Place, report, run_job
from penstock.errors import ClusterError


def test_only_rank_zero_reports(capsys):
    report(1, {"a": 1})
    report(0, {"a": 2})
    assert capsys.readouterr().out == f'{PREFIX}{{"a": 2}}\n'


def test_results_progress_and_talk_are_told_apart():
    finished = []
    output = Output(finished.append)
    output(0, "stdout", PREFIX + json.dumps({"method": "ddp"}) + "\n")
    output(0, "stdout", PREFIX + json.dumps({"done": "ddp"}) + "\n")
    output(1, "stderr", "some warning\n")
    assert output.results == [{"method": "ddp"}]
    assert finished == ["ddp"]


def test_a_failure_is_explained_by_the_last_line_that_names_an_error():
    output = Output(print)
    for line in ("RuntimeError: first", "RuntimeError: the reason", "[W] shutting down", ""):
        output(2, "stderr", line + "\n")
    assert output.complaint(2, 1) == "rank 2 ended with exit code 1: RuntimeError: the reason"
    assert output.complaint(3, 137) == "rank 3 ended with exit code 137: it printed nothing"


def test_what_a_dying_process_says_of_its_exception_is_the_reason():
    output = Output(print)
    output(0, "stderr", "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n")
    output(0, "stderr", "  what():  sizes do not match\n")
    assert output.complaint(None, 134) == "rank 0 ended with exit code 134: sizes do not match"


def test_a_place_says_how_hosts_share_gpus_links_and_ranks(monkeypatch, capsys):
    asked = {}

    @contextmanager
    def emulated(hosts, rate, **options):
        def run(command, **more):
            asked.update(options, hosts=hosts, rate=rate, command=command, **more)
            more["sink"](0, "stdout", f'{PREFIX}{{"method": "ddp"}}')
            return SimpleNamespace(exit_code=0)

        yield SimpleNamespace(gpu=SimpleNamespace(complaint="no service"), run=run)

    monkeypatch.setattr(jobs, "emulated_cluster", emulated)
    place = Place(2, "10gbit", "coarse", gpus="shared", ranks_per_host=3)
    assert run_job(place, ("-m", "some.worker"), {"a": 1}, print, 9.0, {"X": "y"}) == [{"method": "ddp"}]
    assert (place.ranks, asked["hosts"], asked["rate"], asked["gpus"], asked["per_host"]) == (
        6,
        2,
        "10gbit",
        "shared",
        3,
    )
    assert asked["bucket"] is jobs.plain_bucket
    assert asked["command"][1:] == ["-m", "some.worker", '{"a": 1}']
    assert asked["environment"]["X"] == "y"
    assert capsys.readouterr().err == "penstock: no service\n"


def test_unknown_links_are_refused():
    with pytest.raises(ClusterError, match="links 'golden'; wanted smooth or coarse"):
        Place(2, "1gbit", "golden")
