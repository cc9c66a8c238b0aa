"""Processes of one run: started side by side, their output passed on, all ended when one fails, none left behind.

One thread waits for everything at once: pipes for output, process descriptors (`pidfd`) for exits. SIGTERM and SIGHUP
end a `with` block as Ctrl-C does, and never in the middle of cleaning up; children die with their launcher.
"""

import contextlib
import ctypes
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from penstock.errors import ClusterError

Sink = Callable[[int, str, str], None]  # rank, "stdout" or "stderr", a line with its end
Report = Callable[[], tuple[int, int] | None]  # exit code and rank of a failure that only others saw
Forward = Callable[[], int | None]  # a signal that all workers are to get now, or None
TERMINATE_WAIT_SECONDS = 2.0  # between SIGTERM and SIGKILL
REPORT_SECONDS = 0.2  # between looks at a report, or at signals to forward


@dataclass(frozen=True, slots=True)
class Worker:
    """One process to start."""

    rank: int
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a group of workers ended."""

    exit_code: int  # 0, or that of the first worker that failed; 128 + signal where a signal ended it
    failed_rank: int | None  # the first that failed, where known
    seconds: float  # from the first start to the last exit


def run_workers(
    workers: Sequence[Worker],
    sink: Sink,
    grace_seconds: float = 5.0,
    timeout_seconds: float | None = None,
    report: Report | None = None,
    forward: Forward | None = None,
) -> Outcome:
    """Start every worker and wait for all.

    When one fails, the others have `grace_seconds` to notice and end by themselves; `report` may tell of failures
    that are not a worker's exit. After `timeout_seconds` all are ended and `ClusterError` is raised. `forward` is
    asked several times a second whether the workers should get a signal.
    """
    started = time.monotonic()
    group = _Group(sink, report, forward)
    try:
        for worker in workers:
            group.start(worker)
        group.wait(grace_seconds, None if timeout_seconds is None else started + timeout_seconds)
        if group.failure is None and group.running:
            raise ClusterError(f"ranks {sorted(group.running)} still ran after {timeout_seconds:g} s; all were ended")
    finally:
        group.end()
    code, rank = group.failure or (0, None)
    return Outcome(code, rank, time.monotonic() - started)


class _Group:
    """Processes that live and end together."""

    def __init__(self, sink: Sink, report: Report | None, forward: Forward | None = None) -> None:
        self.sink, self.report, self.forward = sink, report, forward
        self.watchful = report is not None or forward is not None
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.failure: tuple[int, int] | None = None  # exit code and rank of the first that failed
        self.selector = selectors.DefaultSelector()
        self.prepare_child = prepare_child()

    def start(self, worker: Worker) -> None:
        process = subprocess.Popen(
            worker.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches us alone, and we end them in order
            preexec_fn=self.prepare_child,
        )
        self.running[worker.rank] = process
        assert process.stdout is not None
        assert process.stderr is not None
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            os.set_blocking(pipe.fileno(), False)
            self.selector.register(pipe, selectors.EVENT_READ, _Lines(worker.rank, name, pipe, self.sink))
        self.selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, worker.rank)

    def wait(self, grace_seconds: float, deadline: float | None) -> None:
        """Pump output until all have ended, or until the deadline, which a failure brings forward."""
        while self.running:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if remaining == 0.0:
                return
            had_failed = self.failure is not None
            self.pump(min(remaining or REPORT_SECONDS, REPORT_SECONDS) if self.watchful else remaining)
            if self.forward is not None and (number := self.forward()) is not None:
                self.send(number)
            if self.report is not None and self.failure is None:
                self.failure = self.report()
            if self.failure is not None and not had_failed:
                grace_ends = time.monotonic() + grace_seconds
                deadline = grace_ends if deadline is None else min(deadline, grace_ends)

    def pump(self, timeout_seconds: float | None) -> None:
        """Handle the output and exits that are there, or come within the time-out."""
        for key, _ in self.selector.select(timeout_seconds):
            if isinstance(key.data, _Lines):
                if not key.data.read():
                    self.selector.unregister(key.fileobj)
            else:
                self.collect(key.fd, key.data)

    def send(self, number: int) -> None:
        """Send a signal to every worker that still runs."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def collect(self, descriptor: int, rank: int) -> None:
        """Record an exit."""
        self.selector.unregister(descriptor)
        os.close(descriptor)
        code = exit_code(self.running.pop(rank).wait())
        if code != 0 and self.failure is None:
            self.failure = (code, rank)

    def end(self) -> None:
        """End what still runs, politely first, and hand over the last output; nothing is left open."""
        failure = self.failure
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            until = time.monotonic() + TERMINATE_WAIT_SECONDS
            while self.running and time.monotonic() < until:
                self.pump(0.05)
        self.failure = failure  # those we ended did not fail
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, _Lines):
                key.data.finish()
            else:
                os.close(key.fd)
        self.selector.close()


class _Lines:
    """Cuts one worker's output into lines for the sink."""

    def __init__(self, rank: int, name: str, pipe: IO[bytes], sink: Sink) -> None:
        self.rank, self.name, self.pipe, self.sink = rank, name, pipe, sink
        self.rest = b""

    def read(self) -> bool:
        """Pass on what has arrived; return False at the end of the stream."""
        try:
            data = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.emit(line + b"\n")
        if not data:
            self.finish()
        return bool(data)

    def finish(self) -> None:
        """Pass on what is left, even without a line end, and close; a child in the background may keep its end open."""
        if self.pipe.closed:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe.fileno(), 1 << 16):
                self.rest += data
        for line in self.rest.splitlines():
            self.emit(line + b"\n")
        self.rest = b""
        self.pipe.close()

    def emit(self, line: bytes) -> None:
        self.sink(self.rank, self.name, line.decode(errors="replace"))


# How launchers and their children end


PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """Raise `SystemExit(128 + signal)` on SIGTERM and SIGHUP, so that `finally` blocks run; SIGINT does so already.

    Only where the program has not said otherwise: handlers of its own and ignored signals (`nohup`) are kept.
    Outside the main thread Python cannot set handlers, and nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Hold back the ending signals inside the block; they take effect when it ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare_child() -> Callable[[], None]:
    """Return a `preexec_fn`: the child dies when we do, even of SIGKILL, and receives signals that we hold back."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    return prepare


def exit_code(returncode: int) -> int:
    """Return a shell's exit code for a process: 128 + signal where a signal ended it.

    >>> exit_code(-9)
    137
    """
    return returncode if returncode >= 0 else 128 - returncode


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


# Where the lines that workers print go


KEPT_LINES = 20


def print_prefixed(rank: int, stream: str, line: str) -> None:
    """Print a line to the same stream here, with its rank before it."""
    _print(stream, f"[{rank}] {line}")


def print_plain(rank: int, stream: str, line: str) -> None:
    """Print a line to the same stream here, as it is."""
    _print(stream, line)


class RankZero:
    """Prints rank 0's lines as they are and keeps the others' last ones, to explain a failure."""

    def __init__(self) -> None:
        self.kept: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Take one line."""
        if rank == 0:
            _print(stream, line)
        else:
            self.kept[rank].append(line)

    def explain(self, failed_rank: int | None) -> None:
        """Print the last lines of the rank that failed on standard error; of all where that is not known."""
        for rank in sorted(self.kept) if failed_rank is None else [failed_rank]:
            for line in self.kept[rank]:
                print_prefixed(rank, "stderr", line)


class Collected:
    """Keeps every line, for programs that want the workers' output as text."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, str], list[str]] = defaultdict(list)

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Take one line."""
        self.lines[rank, stream].append(line)

    def text(self, rank: int, stream: str = "stdout") -> str:
        """Return what `rank` has printed."""
        return "".join(self.lines[rank, stream])


def on_stderr(sink: Sink) -> Sink:
    """Return a sink that prints all lines on standard error, for commands whose standard output is their result."""
    return lambda rank, stream, line: sink(rank, "stderr", line)


def default_sink(workers: int) -> Sink:
    """Return plain output for one worker, prefixed lines for several."""
    return print_plain if workers == 1 else print_prefixed


def _print(stream: str, text: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(text)
    target.flush()


# Ports and NICs of this machine


PORT_RANGE = (20000, 32768)  # from 32768 on are Linux's ephemeral ports: one that is free now may soon not be
PORT_TRIES = 100


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free port outside the ephemeral range, where workers can meet.

    Seconds pass on a busy machine before the workers use it. It is chosen at random, so that two programs that look at
    the same time do not find the same one.
    """
    for _ in range(PORT_TRIES):
        port = random.SystemRandom().randrange(*PORT_RANGE)
        with socket.socket() as listener:
            try:
                listener.bind((address, port))
            except OSError:
                continue
            return port
    raise ClusterError(
        f"{PORT_TRIES} ports of {address} between {PORT_RANGE[0]} and {PORT_RANGE[1]} are all in use; stop some program"
    )


def sent_nbytes(nic: str) -> int:
    """Return how many bytes an interface of this process's network namespace has sent, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == nic:
            return int(counters.split()[8])
    raise AssertionError(f"no NIC called {nic} here")
