"""The ranks of a job as adaptors see them: who they are, and small collectives between them.

    world = join()                       # the engine is chosen: MPI under mpirun, gloo otherwise
    (mean,) = world.all_reduce([loss])   # numpy arrays in, new arrays out
    weights = world.broadcast(weights)   # rank 0's
    world.close()

All ranks make the same calls in the same order. Each call first compares what ranks bring (one small message to rank 0
and back), so that ranks which bring different things raise the same error instead of waiting for one another. What is
averaged in every iteration goes through a `Session`, which compares once.
"""

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MismatchError, PenstockError, PlanError, TransportError
from penstock.planning.agree import TransportRanks
from penstock.runtime.communicator import Communicator
from penstock.runtime.connect import GLOO, MEMORY, MPI, join_engine
from penstock.runtime.executor import TIMEOUT_SECONDS
from penstock.runtime.failure_diagnosis import Note, explained
from penstock.runtime.launch import Place, is_mpirun, place_of, torchrun_variables
from penstock.runtime.transport import Transport

Array = NDArray[Any]
SUMS: Mapping[str, Callable[[Array], Array] | None] = {  # None: summed on the way; else what is made of all ranks'
    "average": None,
    "sum": None,
    "min": lambda stacked: stacked.min(axis=0),
    "max": lambda stacked: stacked.max(axis=0),
    "product": lambda stacked: stacked.prod(axis=0, dtype=stacked.dtype),
}
_NATIVE = ("float32", "float64", "int32", "int64")  # that every engine sums by itself
_SUMMED = (*_NATIVE, "float16", "bfloat16", "int8", "int16", "uint8")
_BROADCAST_NBYTES = 256 * 1024 * 1024  # at once: more would double the memory of a large model


class WorldRanks(TransportRanks):
    """The ranks of a world; what goes wrong names the rank that is gone."""

    def __init__(self, transport: Transport, timeout_seconds: float) -> None:
        super().__init__(transport, timeout_seconds)
        self._engine, self._patience = transport, timeout_seconds

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return every rank's value, by rank."""
        return list(self._named(lambda: super(WorldRanks, self).gather(value, what), what))

    def from_first(self, value: Any, what: str) -> Any:
        """Return rank 0's value."""
        return self._named(lambda: super(WorldRanks, self).from_first(value, what), what)

    def _named(self, action: Callable[[], Any], what: str) -> Any:
        try:
            return action()
        except TransportError as error:
            found = explained(error, self._engine, Note(0, what), self._patience)
            raise found from error


class World:
    """All ranks of a job, over one engine."""

    def __init__(
        self,
        place: Place,
        engine: str,  # by name: mpi, gloo, memory
        connect: Callable[[], Transport],  # all ranks together; messages of one never meet those of another
        close: Callable[[], None] = lambda: None,
        timeout_seconds: float = TIMEOUT_SECONDS,  # of one message
    ) -> None:
        self.place, self.engine, self._connect, self._close = place, engine, connect, close
        self.timeout_seconds = timeout_seconds
        self.transport = connect()
        self.communicator = Communicator(self.transport, timeout_seconds)
        self.ranks = WorldRanks(self.transport, timeout_seconds)
        self._lock = threading.RLock()
        self._failed = False

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self.place.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.place.world_size

    def new_transport(self) -> Transport:
        """Return one more transport between all ranks, which make it together."""
        with self._lock:
            return self._connect()

    def all_reduce(
        self, arrays: Sequence[Array], op: str = "average", prescale: float = 1.0, postscale: float = 1.0
    ) -> list[Array]:
        """Return the average, sum, min, max or product of each array over all ranks; averages of integers round down.

        Each is multiplied by `prescale` first and by `postscale` in the end.
        """
        if op not in SUMS:
            raise PlanError(f"op={op!r}; wanted one of {', '.join(SUMS)}")
        if (bad := next((each.dtype.name for each in arrays if each.dtype.name not in _SUMMED), None)) is not None:
            raise PlanError(f"all-reduce of {bad}; wanted one of {', '.join(_SUMMED)}")
        with self._lock, self._noting_failure():
            self._compare(f"all-reduce ({op})", [_described(each) for each in arrays])
            values = [_scaled(each, prescale) for each in arrays]
            whole = SUMS[op]
            found = self._summed(values) if whole is None else [whole(self._stacked(each)) for each in values]
            if op == "average":
                found = [_divided(each, self.size) for each in found]
            return [_scaled(each, postscale).reshape(like.shape) for each, like in zip(found, arrays, strict=True)]

    def broadcast(self, arrays: Sequence[Array], root: int = 0) -> list[Array]:
        """Return the root's arrays, of whatever type; other ranks bring arrays of the same shapes and types."""
        if not 0 <= root < self.size:
            raise PlanError(f"root rank {root}; wanted 0 to {self.size - 1}")
        with self._lock, self._noting_failure():
            self._compare(f"broadcast from rank {root}", [_described(each) for each in arrays])
            return [each for group in _groups(arrays) for each in self._broadcast(group, root)]

    def all_gather(self, array: Array) -> Array:
        """Return all ranks' arrays behind one another; they may have different numbers of rows."""
        array = np.atleast_1d(array)
        with self._lock, self._noting_failure():
            what = f"all-gather of rows of {array.shape[1:]} of {array.dtype.name}"
            rows = self._compare(what, [], array.shape[0])
            return self._gathered(array, rows)

    def gather(self, value: Any, what: str = "gathering a value") -> list[Any]:
        """Return every rank's value, by rank: numbers, strings, bytes, and lists, tuples and dicts of these."""
        with self._lock, self._noting_failure():
            return self._compare(what, [], value)

    def gather_objects(self, value: Any, what: str = "gathering objects") -> list[Any]:
        """Return every rank's object, whatever it is, by rank.

        Objects travel pickled: a rank, or a program in its place, can run code on all that make this call.
        """
        return [pickle.loads(each) for each in self.gather(pickle.dumps(value), what)]

    def barrier(self) -> None:
        """Return once all ranks are here."""
        self.gather(None, "a barrier")

    def close(self) -> None:
        """Leave, all ranks together; after a failure, without waiting for ranks that may be gone."""
        if not self._failed:
            self._close()

    def _compare(self, what: str, arrays: list[str], extra: Any = None) -> list[Any]:
        """Return every rank's `extra`; raise the same on all ranks where they are not about the same thing."""
        held = self.ranks.gather((what, arrays, extra), what)
        if complaint := _difference([(call, shapes) for call, shapes, _ in held]):
            raise MismatchError(complaint)
        return [each for _, _, each in held]

    def _summed(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the sum of each, those of one type in one message."""
        found: list[Array] = [np.empty(0)] * len(arrays)
        for dtype in dict.fromkeys(each.dtype for each in arrays):
            places = [index for index, each in enumerate(arrays) if each.dtype == dtype]
            flat = np.concatenate([arrays[index].reshape(-1) for index in places])
            if flat.size:
                self.communicator.all_reduce(flat, strategy="native" if dtype.name in _NATIVE else "ring")
            ends = accumulate((arrays[index].size for index in places), initial=0)
            for index, (start, stop) in zip(places, pairwise(ends), strict=True):
                found[index] = flat[start:stop].reshape(arrays[index].shape)
        return found

    def _stacked(self, array: Array) -> Array:
        """Return all ranks' arrays, by rank; shapes are known to be the same."""
        rows = np.atleast_1d(array)
        return self._gathered(rows, [rows.shape[0]] * self.size).reshape(self.size, *array.shape)

    def _gathered(self, array: Array, rows: Sequence[int]) -> Array:
        row_nbytes = array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        most = max(rows) * row_nbytes
        whole = np.zeros((self.size, most), np.uint8)  # chunks of one size are what a program gathers
        whole[self.rank, : array.nbytes] = _bytes_of(array)
        if most and self.size > 1:
            self.communicator.all_gather(whole.reshape(-1))
        parts = [whole[rank, : count * row_nbytes] for rank, count in enumerate(rows)]
        return np.concatenate(parts).view(array.dtype).reshape(sum(rows), *array.shape[1:])

    def _broadcast(self, arrays: Sequence[Array], root: int) -> list[Array]:
        flat = np.concatenate([_bytes_of(each) for each in arrays])
        if flat.size and self.size > 1:
            self.communicator.broadcast(flat, root)
        ends = accumulate((each.nbytes for each in arrays), initial=0)
        parts = [flat[start:stop] for start, stop in pairwise(ends)]
        return [part.view(each.dtype).reshape(each.shape) for part, each in zip(parts, arrays, strict=True)]

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Pass on what goes wrong, and note it."""
        try:
            yield
        except BaseException as error:
            self.note_failure(error)
            raise

    def note_failure(self, error: BaseException) -> None:
        """Take note that a rank is gone: nothing waits for it any more."""
        self._failed |= isinstance(error, TransportError)


def join(engine: str | None = None, environment: MutableMapping[str, str] = os.environ) -> World:
    """Join the ranks that torchrun, mpirun or Slurm started; alone where none of them did.

    engine: `mpi`, or `gloo` through torch's process group, where torch is installed; None: MPI under mpirun, else gloo
    where there is torch, else MPI. Ranks of one host meet on loopback.
    """
    place = place_of(environment)
    name = choose_engine(engine, environment, place)
    if name == GLOO:
        environment.update(torchrun_variables(environment))
        if place.is_one_host:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    connect, close = join_engine(name)
    world = World(place, name, connect, close)
    found = world.transport.rank, world.transport.world_size
    if found != (place.rank, place.world_size):
        raise PenstockError(
            f"engine {name!r}: this is rank {found[0]} of {found[1]}, and the launcher says {place.rank} of "
            f"{place.world_size}; start all ranks by one launcher"
        )
    return world


def choose_engine(engine: str | None, environment: Mapping[str, str], place: Place) -> str:
    """Return the engine to use; one rank needs none."""
    if engine not in (None, MPI, GLOO):
        raise PlanError(f"no engine called {engine!r}; wanted {MPI!r}, {GLOO!r}, or None to choose")
    if engine is not None:
        return engine
    if place.world_size == 1:
        return MEMORY
    has_torch, has_mpi = find_spec("torch") is not None, find_spec("mpi4py") is not None
    if has_mpi and (is_mpirun(environment) or not has_torch):
        return MPI
    if not has_torch:
        raise PenstockError(
            f"{place.world_size} ranks, and nothing to carry their messages; `pip install 'penstock[mpi]'` and start "
            "them by mpirun, or install torch, whose gloo then does"
        )
    return GLOO


def _described(array: Array) -> str:
    return f"{tuple(array.shape)} of {array.dtype.name}"


def _difference(held: Sequence[tuple[str, list[str]]]) -> str:
    """Say how ranks differ in what they call and bring; empty where they do not."""
    what, arrays = held[0]
    for rank, (other, theirs) in enumerate(held):
        if other != what:
            return f"rank 0 calls {what}, rank {rank} {other}; all ranks must make the same calls in the same order"
        if len(theirs) != len(arrays):
            return f"{what}: rank 0 brings {len(arrays)} tensors, rank {rank} {len(theirs)}; wanted as many"
        for index, (mine, other) in enumerate(zip(arrays, theirs, strict=True)):
            if mine != other:
                return f"{what}, tensor {index}: rank 0 brings {mine}, rank {rank} {other}; wanted the same"
    return ""


def _bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _groups(arrays: Sequence[Array]) -> list[list[Array]]:
    """Return the arrays in groups that are sent at once."""
    groups: list[list[Array]] = [[]]
    for each in arrays:
        if groups[-1] and sum(one.nbytes for one in groups[-1]) + each.nbytes > _BROADCAST_NBYTES:
            groups.append([])
        groups[-1].append(each)
    return [group for group in groups if group]


def _scaled(array: Array, factor: float) -> Array:
    return array if factor == 1.0 else (array * factor).astype(array.dtype)


def _divided(array: Array, by: int) -> Array:
    whole = np.issubdtype(array.dtype, np.integer)
    return (array // by if whole else array / np.asarray(by, array.dtype)).astype(array.dtype, copy=False)
