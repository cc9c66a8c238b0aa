"""How the ranks of a job agree while they plan: small values, gathered from all ranks or told by rank 0.

Over torch's process group `GroupRanks` in `torch/collective_errors.py` does it; here is the same over an engine of our
own, for ranks of MPI and for ranks that are threads of one process.

Values travel without pickle, over both: a head, then JSON.

    penstock LENGTH CRC-32                        of the text that follows, 20 bytes
    {"tuple": [{"Route": ["ring", "onebit", 1]}, true]}

They are None, truth values, numbers, strings, bytes, lists, tuples, dicts, and the dataclasses of plans, traces and
networks that are named here; nothing else can be made of a message. Each field of a dataclass is compared with its
annotation. The checksum finds damage; it is no signature.
"""

import base64
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, partial
from types import UnionType
from typing import Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from penstock.curves import CodecCurves, Curve
from penstock.errors import FormatError, PenstockError, PlanError, TransportError, one_line
from penstock.network import LinearCost, Network
from penstock.plan import Bucket, Plan, Route
from penstock.runtime.hosts import Nodes, group_by_host, this_host
from penstock.runtime.transport import CHECK_TAG, Bytes, Transport, Work
from penstock.timeline import Span, Timeline
from penstock.trace import Tensor, Trace

Made = TypeVar("Made")
WAIT_SECONDS = 300.0  # for the slowest rank to come
MOST_NBYTES = 1 << 32  # of a message
_HEAD, _NAME = struct.Struct("<8sQI"), b"penstock"
_WANTED = "a value that a rank of this version of penstock sent"


class Ranks(Protocol):
    """All ranks of a job; every rank must make the same calls at the same time."""

    @property
    def rank(self) -> int:
        """Which rank this is."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return every rank's value, by rank; `what` is done, in words, should a rank be gone."""

    def from_first(self, value: Any, what: str) -> Any:
        """Return rank 0's value; that of other ranks is not looked at."""


class TransportRanks:
    """The ranks of an engine of ours; values travel by way of rank 0."""

    def __init__(self, transport: Transport, timeout_seconds: float = WAIT_SECONDS) -> None:
        self._transport, self._timeout_seconds = transport, timeout_seconds
        self.rank, self.world_size = transport.rank, transport.world_size

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return every rank's value, by rank; raise `FormatError` on all ranks where one sent none of ours."""
        message = pack(value)  # on rank 0 too: what cannot be sent is raised where all bring it, before any waits
        if self.rank != 0:
            self._send(message, 0, what)
        wrong, held = self.from_first(self._gathered(value, what) if self.rank == 0 else None, what)
        if wrong:
            raise FormatError(*wrong[0])
        return list(held)

    def _gathered(self, value: Any, what: str) -> tuple[list[tuple[Any, ...]], list[Any]]:
        """Return what is wrong with messages to rank 0, and the values.

        All that can be told apart are taken, so that their senders do not wait; what follows a head that is none of
        ours has no known length.
        """
        wrong, held = [], [value]
        for peer in range(1, self.world_size):
            try:
                held.append(self._received(peer, what))
            except FormatError as error:
                wrong.append((error.where, error.field, error.found, error.wanted))
        return wrong, [] if wrong else held

    def from_first(self, value: Any, what: str) -> Any:
        """Return rank 0's value; raise `PlanError` on all ranks where no message can hold it."""
        complaint = ""
        if self.rank == 0:
            try:
                message = pack(("", value))
            except PlanError as error:
                complaint = str(error)
                message = pack((complaint, None))
            for peer in range(1, self.world_size):
                self._send(message, peer, what)
        else:
            complaint, value = self._received(0, what)
        if complaint:
            raise PlanError(complaint)
        return value

    def _send(self, message: tuple[bytes, bytes], peer: int, what: str) -> None:
        for part in message:
            view = np.frombuffer(part, np.uint8).copy()
            self._do(partial(self._transport.isend, view, peer, CHECK_TAG), what, peer)

    def _received(self, peer: int, what: str) -> Any:
        where = f"message of rank {peer} ({what})"
        head = self._receive(_HEAD.size, peer, what)
        return unpack(head, self._receive(text_nbytes(head, where), peer, what), where)

    def _receive(self, nbytes: int, peer: int, what: str) -> bytes:
        view: Bytes = np.zeros(nbytes, np.uint8)
        self._do(partial(self._transport.irecv, view, peer, CHECK_TAG), what, peer)
        return view.tobytes()

    def _do(self, start: Callable[[], Work], what: str, peer: int) -> None:
        try:
            start().wait(self._timeout_seconds)
        except (TimeoutError, ConnectionError) as error:
            raise TransportError("planning", self.rank, f"{peer}, {what}", None, str(error)) from error


def from_rank_0(make: Callable[[], Made], ranks: Ranks) -> Made:
    """Return what `make` returns on rank 0, on every rank; it is called on rank 0 only.

    What it raises is raised on every rank.
    """
    told: tuple[Made | None, str] = (None, "")
    if ranks.rank == 0:
        try:
            told = (make(), "")
        except PenstockError as error:
            told = (None, f"{type(error).__name__}: {error}")
    made, complaint = ranks.from_first(told, "sharing the plan")
    if complaint or made is None:
        raise PlanError(f"rank 0 could not plan: {complaint}")
    return made  # type: ignore[no-any-return]  # what rank 0's `make` returned


def nodes_of(ranks: Ranks) -> Nodes:
    """Return the ranks of each host; every rank must call this at the same time."""
    return group_by_host(ranks.gather(this_host(), "gathering where ranks are"))


# Values as bytes


def pack(value: Any) -> tuple[bytes, bytes]:
    """Return the head and the text of a message; raise `PlanError` for a value that no message can hold."""
    text = json.dumps(_described(value)).encode()
    if len(text) > MOST_NBYTES:
        raise PlanError(f"a value of {len(text)} bytes to tell other ranks; wanted {MOST_NBYTES} at most")
    return _HEAD.pack(_NAME, len(text), zlib.crc32(text)), text


def text_nbytes(head: bytes, where: str) -> int:
    """Return how long the text is that follows a head; raise `FormatError` where that is none of ours."""
    name, nbytes, _ = _HEAD.unpack(head)
    if name != _NAME or not 0 < nbytes <= MOST_NBYTES:
        raise FormatError(where, "head", head.hex(), _WANTED)
    return int(nbytes)


def unpack(head: bytes, text: bytes, where: str) -> Any:
    """Return the value of a message; raise `FormatError` for what `pack` did not make."""
    if (len(text), zlib.crc32(text)) != _HEAD.unpack(head)[1:]:
        raise FormatError(where, "checksum", f"{len(text)} bytes that are not those sent", _WANTED)
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, PenstockError) as error:
        raise FormatError(where, "text", one_line(error), _WANTED) from error


def unpack_whole(message: bytes, where: str) -> Any:
    """Return the value of a head and its text in one; raise `FormatError` for what `pack` did not make."""
    head, text = message[: _HEAD.size], message[_HEAD.size :]
    if len(head) < _HEAD.size or text_nbytes(head, where) != len(text):
        raise FormatError(where, "head", head.hex(), _WANTED)
    return unpack(head, text, where)


def _described(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_described(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_described(each) for each in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_described(key), _described(each)] for key, each in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if _classes().get(type(value).__name__) is type(value):
        return {type(value).__name__: [_described(getattr(value, each.name)) for each in fields(value)]}
    raise PlanError(
        f"a {type(value).__name__} to tell other ranks; wanted numbers, strings, bytes, lists, tuples or dicts of "
        "these, or a plan, trace or network"
    )


def _value(found: Any) -> Any:
    """Return the value that JSON describes."""
    if isinstance(found, list):
        return [_value(each) for each in found]
    if not isinstance(found, dict):
        return found
    ((kind, inside),) = found.items()
    if kind in _classes():
        return _made(_classes()[kind], _value(inside))
    if kind not in _KINDS:
        raise ValueError(f"a value of the kind {kind!r}")
    return _KINDS[kind](inside)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda inside: tuple(_value(each) for each in inside),
    "dict": lambda inside: {_value(key): _value(each) for key, each in inside},
    "bytes": lambda inside: base64.b64decode(inside, validate=True),
}


@cache
def _classes() -> dict[str, type[Any]]:
    """Return the dataclasses that a message can hold, by name."""
    from penstock.planning.planning import Decision  # which imports this module

    plans = (Bucket, Decision, Plan, Route, Span, Timeline)
    return {each.__name__: each for each in (*plans, CodecCurves, Curve, LinearCost, Network, Tensor, Trace)}


def _made(kind: type[Any], values: list[Any]) -> Any:
    """Return a dataclass of these fields, each of which is what its annotation says."""
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]  # a class is hashable
    for (name, hint), value in zip(hints.items(), values, strict=True):
        if not _fits(value, hint):
            raise ValueError(f"{kind.__name__}.{name} is a {type(value).__name__}; wanted {hint}")
    return kind(*values)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    found = get_type_hints(kind)
    return {each.name: found[each.name] for each in fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    """Say whether a value is of an annotation that one of our dataclasses has.

    >>> _fits((1, 2), tuple[int, ...]), _fits(("a", 1.0), tuple[str, float]), _fits(None, int | None), _fits(True, int)
    (True, True, True, False)
    """
    origin, inside = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, each) for each in inside)
    if origin is tuple:
        wanted = inside[:1] * len(value) if isinstance(value, tuple) and inside[-1] is Ellipsis else inside
        return (
            isinstance(value, tuple)
            and len(value) == len(wanted)
            and all(_fits(each, one) for each, one in zip(value, wanted, strict=True))
        )
    if origin is not None:  # of a mapping
        key, held = inside
        return isinstance(value, dict) and all(_fits(one, key) and _fits(each, held) for one, each in value.items())
    if hint in (int, float):
        return isinstance(value, hint | int) and not isinstance(value, bool)
    return isinstance(value, hint)
