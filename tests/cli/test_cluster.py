import json
import os
import subprocess
import sys

import pytest

import command
from penstock.cli.cluster import parse_environment
from penstock.cli.main import main
from penstock.cluster import emulated_cluster
from penstock.errors import ClusterError


def why_not():
    try:
        with emulated_cluster(hosts=1, rate="1gbit"):
            return ""
    except ClusterError as error:
        return str(error)


@pytest.fixture(scope="module")
def hosts():
    """Skip where this machine cannot emulate hosts, and say why."""
    if reason := why_not():
        pytest.skip(reason)


def penstock(*arguments):
    """Run a command in a process of its own, whose standard streams workers inherit."""
    line = [sys.executable, "-m", "penstock", "cluster", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


def complaint_of(capsys, monkeypatch, *arguments):
    """Return what the command says on standard error after it has ended with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["penstock", "cluster", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("verb", [("run", "--", "true"), ("check",), ("clean",)])
def test_without_root_every_verb_says_so_in_one_line(capsys, monkeypatch, verb):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    expected = "penstock: emulated hosts need root to make network namespaces; run the same command with `sudo -E`\n"
    assert complaint_of(capsys, monkeypatch, *verb) == expected


def test_without_util_linux_the_package_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "need `nsenter`, which is not on PATH; `apt install util-linux`" in complaint_of(
        capsys, monkeypatch, "clean"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rate", "fast"), "rate 'fast': wanted a number and one of bit, kbit, mbit, gbit"),
        (("--rate", "1gbit,1gbit"), "names 2 hosts of 4; give one rate, or one per host"),
        (("--hosts", "0"), "0 hosts: wanted 1 to 250"),
        (("--hosts", "1", "--uplink", "1gbit"), "2 racks for 1 hosts: wanted 1 to 1"),
        (("--latency", "5"), "latency '5': wanted a number and one of us, ms, s, as in 5ms"),
        (("--env", "A"), "--env 'A': wanted NAME=VALUE"),
        (("--engine", "nccl"), "engine 'nccl': wanted one of gloo, mpi"),
        (("--ranks-per-host", "0"), "0 workers per host: wanted at least 1"),
        (("--per-host", "0"), "0 workers per host: wanted at least 1"),
        (("--gpus", "two"), "gpus 'two': wanted one of none, shared"),
    ],
)
def test_bad_options_end_in_one_line_and_exit_code_2(hosts, options, message):
    result = command.penstock("cluster", "run", *options, "--", "true")
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_gpus_are_not_shared_where_torch_sees_none(hosts):
    if pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there is a GPU to share")
    result = command.penstock("cluster", "run", "--gpus", "shared", "--", "true")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--gpus shared: torch sees no GPU here; leave it out, and see `penstock doctor`" in result.stderr


def test_what_follows_the_dashes_is_left_alone(hosts):
    result = penstock("run", "--hosts", "1", "--env", "WORD=a b", "--", "sh", "-c", 'echo "$WORD" $1', "sh", "--hosts")
    assert (result.returncode, result.stdout) == (0, "a b --hosts\n")


def test_how_a_run_ended_is_json_and_the_workers_lines_go_to_stderr(hosts):
    result = penstock("run", "--hosts", "2", "--json", "--", "echo", "--json")
    assert set(json.loads(result.stdout)) == {"exit_code", "failed_rank", "seconds"}
    assert sorted(result.stderr.splitlines()) == ["[0] --json", "[1] --json"]


def test_a_failing_rank_is_named_and_its_exit_code_returned(hosts):
    script = "echo output; if [ $RANK = 1 ]; then echo why >&2; exit 7; fi"
    result = penstock("run", "--hosts", "2", "--rank0", "--", "sh", "-c", script)
    assert result.returncode == 7
    assert result.stdout == "output\n"
    assert "[1] why" in result.stderr
    assert "rank 1 failed first, with exit code 7" in result.stderr


def test_latency_reaches_the_workers_and_is_announced_as_user_space(hosts):
    script = "echo $PENSTOCK_MESSAGE_DELAY_SECONDS"
    result = penstock("run", "--hosts", "1", "--latency", "5ms", "--", "sh", "-c", script)
    assert float(result.stdout) == 0.005
    assert result.stderr == (
        "penstock: latency: 5 ms are added to each message in user space, by penstock's transports only\n"
    )


def test_check_prints_every_pair_twice_as_json(hosts):
    result = penstock("check", "--hosts", "2", "--rate", "100mbit", "--seconds", "0.05", "--tolerance", "1e6", "--json")
    document = json.loads(result.stdout)
    assert result.returncode == 0, result.stderr
    assert [(pair["mode"], pair["source"], pair["target"]) for pair in document["pairs"]] == [
        ("alone", 0, 1),
        ("alone", 1, 0),
        ("together", 0, 1),
        ("together", 1, 0),
    ]
    assert 0 < document["worst_deviation"] < 1e6
    assert document["ok"] is True


def test_check_fails_where_the_deviation_is_too_large(hosts):
    result = penstock("check", "--hosts", "2", "--rate", "100mbit", "--seconds", "0.05", "--tolerance", "0")
    assert result.returncode == 1
    assert "MORE THAN 0%" in result.stdout


def test_clean_says_when_there_is_nothing_to_do(hosts):
    """Tests beside this one may leave something to clean at any moment, but not at every one."""
    assert any(command.penstock("cluster", "clean").stdout == "nothing to clean\n" for _ in range(20))
    assert any(json.loads(command.penstock("cluster", "clean", "--json").stdout) == [] for _ in range(20))


def test_settings_keep_everything_after_the_first_equals_sign():
    assert parse_environment(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
