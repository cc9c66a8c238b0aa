"""Joins the ranks that a launcher started: torchrun or `penstock cluster run` for gloo, mpirun for MPI."""

import contextlib
from collections.abc import Callable, Iterator

from penstock.errors import StrategyError
from penstock.runtime.transport import Transport


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

    try:
        yield start_gloo()
    finally:
        stop()


@contextlib.contextmanager
def _mpi() -> Iterator[Transport]:
    from penstock.runtime.transport.mpi import MpiTransport

    transport = MpiTransport()
    yield transport
    transport.close()  # not after an error: closing waits for ranks that may be gone


_ENGINES: dict[str, Callable[[], contextlib.AbstractContextManager[Transport]]] = {"gloo": _gloo, "mpi": _mpi}
