"""Workers without namespaces: plain processes through the same code."""

import random
import socket
import sys

import pytest

from penstock.cluster.processes import (
    PORT_RANGE,
    PORT_TRIES,
    TERMINATE_WAIT_SECONDS,
    Collected,
    RankZero,
    Worker,
    default_sink,
    exit_code,
    free_port,
    print_plain,
    print_prefixed,
    run_workers,
)
from penstock.errors import ClusterError


def shells(*scripts):
    return [Worker(rank, ("sh", "-c", script)) for rank, script in enumerate(scripts)]


def run(*scripts, sink=None, **options):
    return run_workers(shells(*scripts), sink or Collected(), **options)


def test_output_comes_line_by_line_with_its_rank_and_stream():
    seen = Collected()
    run("echo a; echo b; printf end", "echo oh >&2", sink=seen)
    assert seen.lines == {(0, "stdout"): ["a\n", "b\n", "end\n"], (1, "stderr"): ["oh\n"]}


def test_megabytes_of_output_arrive_whole():
    seen = Collected()
    run_workers([Worker(0, (sys.executable, "-c", "for _ in range(30000): print('x' * 99)"))], seen)
    assert len(seen.text(0)) == 3_000_000


def test_all_succeeding_is_success():
    outcome = run("true", "sleep 0.1")
    assert (outcome.exit_code, outcome.failed_rank) == (0, None)
    assert outcome.seconds >= 0.1


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -KILL $$", 137), ("kill -SEGV $$", 139)])
def test_the_exit_code_is_the_first_failing_workers(script, code):
    outcome = run("sleep 200", script, grace_seconds=0.0)
    assert (outcome.exit_code, outcome.failed_rank) == (code, 1)


def test_the_others_may_end_by_themselves_within_the_grace():
    seen = Collected()
    outcome = run("exit 3", "sleep 0.3; echo saved", sink=seen, grace_seconds=200)
    assert outcome.exit_code == 3
    assert outcome.seconds < 100
    assert seen.text(1) == "saved\n"


def test_one_that_ignores_sigterm_is_killed(tmp_path):
    deaf = f'trap "" TERM; touch {tmp_path}/deaf; while :; do sleep 1; done'
    outcome = run(f"until [ -e {tmp_path}/deaf ]; do sleep 0.05; done; exit 3", deaf, grace_seconds=0.0)
    assert outcome.exit_code == 3
    assert TERMINATE_WAIT_SECONDS <= outcome.seconds < 100


def test_time_out_names_who_still_ran():
    with pytest.raises(ClusterError, match=r"ranks \[1\] still ran after 2 s; all were ended"):
        run("true", "sleep 200", timeout_seconds=2)


def test_a_background_child_that_keeps_the_pipe_open_is_not_waited_for():
    assert run("sleep 60 & echo started").seconds < 50


def test_a_command_that_does_not_exist_is_told():
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        run_workers([Worker(0, ("no-such-program",))], Collected())


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (7, 7), (-9, 137), (-15, 143)])
def test_signals_become_a_shells_exit_codes(returncode, code):
    assert exit_code(returncode) == code


def test_several_workers_are_told_apart_and_one_is_not_prefixed(capsys):
    assert (default_sink(1), default_sink(2)) == (print_plain, print_prefixed)
    default_sink(1)(0, "stdout", "a\n")
    default_sink(2)(3, "stderr", "b\n")
    assert capsys.readouterr() == ("a\n", "[3] b\n")


def test_rank_zero_alone_is_shown_until_another_fails(capsys):
    sink = RankZero()
    for rank in range(3):
        sink(rank, "stdout", f"line of {rank}\n")
    assert capsys.readouterr() == ("line of 0\n", "")
    sink.explain(2)
    assert capsys.readouterr() == ("", "[2] line of 2\n")
    sink.explain(None)
    assert capsys.readouterr() == ("", "[1] line of 1\n[2] line of 2\n")


def test_a_free_port_can_be_bound_and_is_not_one_that_the_kernel_hands_out():
    with socket.socket() as listener, socket.socket() as other:
        port = free_port()
        listener.bind(("127.0.0.1", port))
        other.bind(("127.0.0.1", 0))
        assert PORT_RANGE[0] <= port < PORT_RANGE[1] <= other.getsockname()[1]


def test_a_port_in_use_is_not_chosen(monkeypatch):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        taken = holder.getsockname()[1]
        free = free_port()
        drawn = iter([taken, taken, free])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
        assert free_port() == free


def test_where_all_are_in_use_it_is_said(monkeypatch):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        taken = holder.getsockname()[1]
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: taken)
        with pytest.raises(
            ClusterError, match=rf"{PORT_TRIES} ports of 127\.0\.0\.1 between 20000 and 32768 are all in use"
        ):
            free_port()
