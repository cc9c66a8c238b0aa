"""The GPU's clock on a stand-in for torch's events; the real one is compared with the wall clock in test_profile."""

import pytest

torch = pytest.importorskip("torch", reason="penstock.torch needs torch")

from penstock.torch import clocks  # noqa: E402
from penstock.torch.clocks import CudaClock, HostClock, clock_for, device_name  # noqa: E402

HOST = [0.0]
MADE = []


class FakeEvent:
    def __init__(self, enable_timing):
        assert enable_timing
        self.recorded, self.waited = [], 0
        MADE.append(self)

    def record(self, stream):
        self.recorded.append((stream, HOST[0]))

    def synchronize(self):
        self.waited += 1

    def elapsed_time(self, end):
        return (end.recorded[-1][1] - self.recorded[-1][1]) * 1e3


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device} at {HOST[0]}")
    monkeypatch.setattr(clocks, "perf_counter", lambda: HOST[0])
    HOST[0] = 1.0
    MADE.clear()
    return CudaClock(torch.device("cuda:1"), marks=3)


def at(seconds, mark):
    HOST[0] = seconds
    return mark()


def test_events_are_made_before_they_are_needed_and_more_when_they_run_out(clock):
    before = len(MADE)
    marks = [at(2.0, clock.start), at(3.0, clock.mark), at(4.0, clock.mark)]
    assert len(MADE) == before
    assert len({id(mark) for mark in marks}) == 3
    marks.append(at(5.0, clock.mark))
    assert len(MADE) == before + 1


def test_nobody_waits_until_a_time_is_asked_for(clock):
    start, end = at(2.0, clock.start), at(3.0, clock.mark)
    assert (start.waited, end.waited) == (0, 0)
    assert clock.seconds(start, end) == 1.0
    assert end.waited == 1


def test_moments_too_close_for_a_kernel_share_an_event(clock):
    at(2.0, clock.start)
    first, second, third = at(3.0, clock.mark), at(3.000009, clock.mark), at(3.000011, clock.mark)
    assert first is second
    assert third is not first


def test_an_iteration_never_shares_with_the_one_before(clock):
    assert at(2.0, clock.start) is not at(2.000001, clock.start)


def test_marks_go_to_the_stream_that_was_current_as_the_iteration_started(clock):
    at(2.0, clock.start)
    mark = at(3.0, clock.mark)
    assert mark.recorded[-1] == ("stream of cuda:1 at 2.0", 3.0)


def test_a_processor_is_timed_by_the_host(monkeypatch):
    clock = clock_for(torch.device("cpu"), 0)
    assert isinstance(clock, HostClock)
    start = clock.start()
    assert clock.seconds(start, start + 2.5) == 2.5


@pytest.mark.parametrize(("threads", "wanted"), [(1, ", 1 thread"), (8, ", 8 threads")])
def test_a_processor_is_named_with_its_threads(monkeypatch, threads, wanted):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert device_name(torch.device("cpu")).endswith(wanted)
