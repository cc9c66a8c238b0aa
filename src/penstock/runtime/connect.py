"""Joins the ranks that a launcher started: torchrun or `penstock cluster run` for gloo, mpirun for MPI."""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import StrategyError, TransportError
from penstock.runtime.launch import place_of
from penstock.runtime.transport import DeathError, Transport, never, within

if TYPE_CHECKING:
    from penstock.runtime.transport.mpi import MpiTransport

GLOO, MPI, MEMORY = "gloo", "mpi", "memory"
WITHOUT_SUMS = {MPI: ("float16", "bfloat16")}  # types of elements that an engine's own all-reduce cannot add
REST_SECONDS = 1e-4  # between polls of a long wait in MPI: the model computes on the same cores
START_SECONDS = 300.0  # for the slowest rank to come to MPI's start
Connect = Callable[[], Transport]
_ORDINARY_MPI = {  # mpi4py's own options
    "initialize": True,
    "threads": True,
    "thread_level": "multiple",
    "finalize": None,
    "errors": "exception",
}
_not_started = threading.Event()  # MPI, in time


@contextlib.contextmanager
def connected(engine: str) -> Iterator[Transport]:
    """Give the engine called `gloo` or `mpi` for the length of a `with` block; all ranks must enter it.

    gloo takes rank, world size and meeting point from the environment, as torch.distributed does under torchrun.
    """
    if engine not in _ENGINES:
        raise StrategyError(f"no engine {engine!r}; known: {', '.join(_ENGINES)}")
    with _ENGINES[engine]() as transport:
        yield transport


@contextlib.contextmanager
def _gloo() -> Iterator[Transport]:
    from penstock.runtime.transport.c10d import start_gloo, stop

    transport = start_gloo()  # where it fails there is nothing to stop
    try:
        yield transport
    finally:
        stop()


@contextlib.contextmanager
def _mpi() -> Iterator[Transport]:
    transport = _mpi_transport(0.0)
    yield transport
    transport.close()  # not after an error: closing waits for ranks that may be gone


def _mpi_transport(rest_seconds: float) -> "MpiTransport":
    """Start MPI and make a communicator; raise `TransportError` where a rank has not come."""
    try:
        from penstock.runtime.transport.mpi import MpiTransport

        return MpiTransport(rest_seconds=rest_seconds)
    except ConnectionError as error:
        cause = str(error) if isinstance(error, DeathError) else f"{error}; which rank is not known"
        raise TransportError("mpi", place_of(os.environ).rank, "joining the other ranks", None, cause) from error


_ENGINES: dict[str, Callable[[], contextlib.AbstractContextManager[Transport]]] = {"gloo": _gloo, "mpi": _mpi}


def join_engine(engine: str) -> tuple[Connect, Callable[[], None]]:
    """Join the other ranks; return what makes transports between them, all ranks together, and what ends it.

    gloo goes through torch's default process group, which is made here unless there is one. `memory` is for one rank.
    """
    if engine == GLOO:
        from penstock.runtime.transport.c10d import join_gloo

        return join_gloo()
    if engine == MPI:
        return lambda: _mpi_transport(REST_SECONDS), lambda: None
    from penstock.runtime.transport.memory import Fabric

    return lambda: Fabric(1).transport(0), lambda: None


def release(transport: Transport) -> None:
    """Give back what an engine has few of; every rank must call this at the same time."""
    if hasattr(transport, "close"):
        transport.close()


def start_mpi(seconds: float = START_SECONDS, is_vain: Callable[[], bool] = never) -> None:
    """Start MPI unless it is; raise `ConnectionError` where a rank has not come within `seconds`, or `is_vain`.

    mpi4py does it as it is imported, and keeps Python's lock meanwhile. MPI_Init waits for all ranks: where one dies or
    is stopped before it comes there, no thread of the others runs any more. So a thread without the lock calls it here.
    Where a script has imported `mpi4py.MPI` before, or has changed `mpi4py.rc`, MPI starts as the script has it, and
    nothing bounds that.
    """
    if _not_started.is_set():
        raise ConnectionError("MPI did not start before, and cannot be started again in the same process")
    import mpi4py

    if "mpi4py.MPI" in sys.modules or any(getattr(mpi4py.rc, name) != each for name, each in _ORDINARY_MPI.items()):
        return
    mpi = _imported()
    if mpi.Is_initialized():
        return
    try:
        if mpi.Get_library_version().startswith("Open MPI"):
            silence = f"MPI did not start within {seconds:g} s: its start waits for all ranks"
            within(seconds, partial(_initialize, mpi), silence, is_vain)
        else:  # others were not tried, and may want the main thread
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
    except BaseException:
        _not_started.set()
        raise
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # as mpi4py does where it starts MPI


def _imported() -> Any:
    """Return mpi4py's module, which will end MPI with the process and has not started it."""
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = True, None
    return MPI


def _initialize(mpi: Any) -> None:
    provided = ctypes.c_int()
    library = ctypes.CDLL(mpi.__file__)  # mpi4py's own: the names of the MPI that it is linked to are found there
    if code := library.MPI_Init_thread(None, None, int(mpi.THREAD_MULTIPLE), ctypes.byref(provided)):
        raise RuntimeError(f"MPI_Init_thread() failed with error code {code}")
