"""How launchers and their children end.

SIGTERM and SIGHUP end a `with` block as Ctrl-C does, and never in the middle of cleaning up; children die with us.
"""

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

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
    """Return what a child does first: it dies with us, even of our SIGKILL, and takes signals that we hold back."""
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
