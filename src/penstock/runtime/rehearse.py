"""Kernels of compressed all-reduces, compiled before anything waits for them, by one process and for all of a machine.

numba takes several seconds for the kernels of one codec and keeps them on disk. Ranks that compress for the first time
would each compile the same ones at the same moment, on the cores that they share. Here a compressed all-reduce is
*rehearsed*: carried out between threads of one process, so that every kernel it calls is compiled and kept. A file says
that a route was rehearsed with these versions on this kind of processor, and a lock keeps others from doing the same.

    compiling = Compiling([Route("ring", "onebit")])    # background processes
    ...                                                 # the first iteration, which is not profiled
    compiling.pause()
    ...                                                 # iterations that are
    compiling.ready(Route("ring", "onebit"))            # goes on, and waits for them, or compiles here
    compiling.stop()

Processes that compile slow down what computes beside them: iterations of four ranks on two cores by a sixth, however
low their priority. So they run while nothing is timed, and only then.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from weakref import finalize

from penstock.codecs.registry import codec_digest, is_low_rank, kernel_folder
from penstock.log import Voice
from penstock.machine import processor, versions
from penstock.plan import Route, parse_route
from penstock.runtime.communicator import Communicator
from penstock.runtime.measure_compressed import compressed_round
from penstock.runtime.pages import fresh_pages
from penstock.runtime.timed import noise
from penstock.runtime.transport.memory import Fabric, MemoryTransport
from penstock.strategies import parse_strategy

PROCESSES = 2  # that compile in the background, at most; a machine with fewer cores has fewer
TAKE_OVER_SECONDS = 15.0  # to wait for a process that may be another job's, and paused; then compile here
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_LOOK_SECONDS = 0.05  # between two looks whether another process is done
_RANKS, _BOUNDS = 2, (0, 96, 256)  # of a rehearsal
_ROUNDS = 3  # feedback that is put off takes another kernel from the second on


class Compiling:
    """Processes that compile the kernels of routes, in the order given, and who waits for them."""

    def __init__(self, routes: Sequence[Route], folder: Path | None = None) -> None:
        self._folder = folder or kernel_folder()
        missing = [str(route) for route in routes if not self.is_ready(route)]
        count = min(PROCESSES, len(os.sched_getaffinity(0)), len(missing))
        found = (_start(missing, self._folder, slot) for slot in range(count))
        self._children = [child for child in found if child is not None]
        finalize(self, _end, self._children)

    def is_ready(self, route: Route) -> bool:
        """Say whether the kernels of a route are on disk; low-rank factors need none."""
        return is_low_rank(route.codec) or _marker(self._folder, route).exists()

    def ready(self, route: Route) -> bool:
        """Return once the kernels of a route are on disk; say whether they were compiled here."""
        marker, began = _marker(self._folder, route), monotonic()
        while not self.is_ready(route):
            waited = monotonic() - began
            with _lock(marker.with_suffix(".lock")) as mine:
                if (mine or waited > TAKE_OVER_SECONDS) and not marker.exists():
                    self.pause()
                    _rehearse_and_mark(route, marker)
                    return True
            self._signal(signal.SIGCONT)
            sleep(_LOOK_SECONDS)
        self.pause()
        return False

    def get_ready(self, route: Route, voice: Voice) -> None:
        """Return once the kernels of a route are on disk, if it has a codec; say so where that takes time."""
        if route.codec is not None and not self.is_ready(route):
            with voice.step(f"compiling the kernels of {route.codec}"):
                self.ready(route)

    def pause(self) -> None:
        """Keep the processes from the cores until something waits for them."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for child in self._children:
            child.send_signal(number)  # which does nothing to one that has ended

    def stop(self) -> None:
        """End the processes that were started here; what they have compiled stays."""
        _end(self._children)


def rehearse(route: Route) -> None:
    """Carry out a compressed all-reduce of two small tensors between threads of this process, a few times."""
    outer = parse_strategy(route.strategy)[1].get("outer")  # threads are one node, and encode nothing inside it
    alike = str(Route(str(outer or route.strategy), route.codec))
    fabric, failures = Fabric(_RANKS), list[BaseException]()
    threads = [threading.Thread(target=_take_part, args=(fabric, r, alike, failures)) for r in range(_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _take_part(fabric: Fabric, rank: int, route: str, failures: list[BaseException]) -> None:
    try:
        transport: MemoryTransport = fabric.transport(rank)
        values = noise(4 * _BOUNDS[-1])
        one_round = compressed_round(Communicator(transport), route, _BOUNDS)
        residual = fresh_pages(values.size)
        for _ in range(_ROUNDS):
            one_round(transport, values, residual)
    except BaseException as error:
        failures.append(error)
        fabric.kill(rank)  # so that ranks that wait for it fail


def _end(children: "list[subprocess.Popen[bytes]]") -> None:
    while children:
        child = children.pop()
        child.kill()  # whether it is paused or not
        child.wait()


def _rehearse_and_mark(route: Route, marker: Path) -> None:
    """Compile; what goes wrong here goes wrong again where the codec is used, on all ranks and not only on this one."""
    with suppress(Exception):
        rehearse(route)
        marker.touch()  # where that fails every process compiles for itself


def _start(routes: Sequence[str], folder: Path, slot: int) -> "subprocess.Popen[bytes] | None":
    """Start a process that compiles, unless as many as may are at it for this folder; it holds their lock."""
    with suppress(OSError), _lock(folder / f"compiling_{slot}.lock", inherited=True) as place:
        if place:
            command = [sys.executable, "-m", __name__, str(folder), *routes]
            quiet = subprocess.DEVNULL
            return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=[place])
    return None


@contextmanager
def _lock(path: Path, inherited: bool = False) -> Iterator[int]:
    """Yield a lock's descriptor, 0 where another process has it; an `inherited` one is held by a child from then on."""
    descriptor = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        yield 0
        return
    except OSError:  # no such folder, or no locks in it: every process for itself
        if inherited:
            raise
        yield -1
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # which gives the lock up, unless a child has it too


def _marker(folder: Path, route: Route) -> Path:
    """Return the file that says that a route was rehearsed.

    Its name has what kernels on disk depend on: the codec's text and parameters, the strategy, versions, the processor.
    """
    assert route.codec is not None
    packages = versions(("penstock", "numba", "llvmlite", "numpy"))
    key = [route.strategy, codec_digest(route.codec), platform.python_version(), processor(), *packages.items()]
    return folder / f"rehearsed_{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"


def main(folder: str, routes: Sequence[str]) -> None:
    """Compile the kernels of routes that no other process is at, one after the other."""
    _end_with_parent()
    for route in map(parse_route, routes):
        marker = _marker(Path(folder), route)
        with _lock(marker.with_suffix(".lock")) as mine:
            if mine and not marker.exists():
                _rehearse_and_mark(route, marker)


def _end_with_parent() -> None:
    """Have the kernel end this process with the one that started it, paused as it may be (Linux)."""
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
