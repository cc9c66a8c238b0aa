"""Kernels of compressed all-reduces, compiled before anything waits for them, by one process and for all of a machine.

numba takes several seconds for the kernels of one codec and keeps them on disk. Ranks that compress for the first time
would each compile the same ones at the same moment, on the cores that they share. Here a compressed all-reduce is
*rehearsed*: carried out between threads of one process, so that every kernel it calls is compiled and kept. A file says
that a route was rehearsed with these versions on this kind of processor, and a lock keeps others from doing the same.

    compiling = Compiling([Route("ring", "onebit")])    # background processes, on what the cores have left
    ...                                                 # the first iterations
    compiling.ready(Route("ring", "onebit"))            # waits for them, or compiles here
    compiling.stop()
"""

import fcntl
import hashlib
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from weakref import finalize

from penstock.codecs.registry import codec_digest, kernel_folder
from penstock.machine import processor, versions
from penstock.plan import Route, parse_route
from penstock.runtime.communicator import Communicator
from penstock.runtime.measure_compressed import compressed_round
from penstock.runtime.pages import fresh_pages
from penstock.runtime.timed import noise
from penstock.runtime.transport.memory import Fabric, MemoryTransport
from penstock.strategies.options import parse_strategy

PROCESSES = 2  # that compile in the background, at most; a machine with fewer cores has fewer
NICENESS = 19  # of these: iterations that are profiled meanwhile should not notice
TAKE_OVER_SECONDS = 5.0  # to wait for them: where other work keeps them from the cores, compile here; twice as long
# for those of another job, which are not ours to stop
_LOOK_SECONDS = 0.05  # between two looks whether another process is done
_RANKS, _BOUNDS, _ROUNDS = (
    2,
    (0, 96, 256),
    3,
)  # of a rehearsal: feedback that is put off differs from the second round on


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
        """Say whether the kernels of a route are on disk."""
        return _marker(self._folder, route).exists()

    def ready(self, route: Route) -> bool:
        """Return once the kernels of a route are on disk; say whether they were compiled here."""
        marker, began = _marker(self._folder, route), monotonic()
        while not marker.exists():
            waited = monotonic() - began
            with _lock(marker.with_suffix(".lock")) as mine:
                if (mine or waited > 2 * TAKE_OVER_SECONDS) and not marker.exists():
                    _rehearse_and_mark(route, marker)
                    return True
            if waited > TAKE_OVER_SECONDS:
                self.stop()
            sleep(_LOOK_SECONDS)
        return False

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
        fabric.kill(rank)  # whoever waits for it


def _end(children: "list[subprocess.Popen[bytes]]") -> None:
    while children:
        child = children.pop()
        child.terminate()
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
    """Compile the kernels of routes that no other process is at, one after the other, on what the cores have left."""
    os.nice(NICENESS)
    parent = os.getppid()
    for route in map(parse_route, routes):
        marker = _marker(Path(folder), route)
        with _lock(marker.with_suffix(".lock")) as mine:
            if mine and not marker.exists():
                _rehearse_and_mark(route, marker)
        if os.getppid() != parent:  # the job is over
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
