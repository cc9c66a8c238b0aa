"""Ranks compare what they are about to run, before any data moves.

Every rank sends rank 0 a claim of fixed size, which says what determines its program (collective, strategy, options,
sizes, codec), not the program itself; rank 0 compares them and answers all with a verdict. It costs two small messages
per rank, once per program. Later calls of the same program send nothing more: the program's
fingerprint and the number of the call are part of every message's tag, so that ranks which run different calls do
not exchange data but run into the timeout.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from time import monotonic
from typing import Any

import numpy as np

from penstock.errors import MismatchError, TransportError
from penstock.runtime.hosts import processors, this_host
from penstock.runtime.transport import CHECK_TAG, Bytes, DeathError, Transport

_NBYTES = 1024  # of a claim and of a verdict
_LETTERS = 300  # of a text in one of them, where there is room
_MAY_DIFFER = ("host", "cores")
_WORDS = {  # what a difference is called where not by its field's name, and what to do about it
    "digest": ("options (digest)", "all ranks must make the same call"),
    "codec_text": (
        "the text of codec {codec} (fingerprint)",
        "give all hosts the same .cll file, operators and penstock, or the same Python class and settings",
    ),
}
_COMPARING = "0, comparing programs"
_PATIENCE = 0.8  # of the timeout: rank 0 gives up early enough to tell the others who is missing


@dataclass(frozen=True, slots=True)
class Claim:
    """What one rank is about to run; fields in the order in which a difference is reported."""

    error: str = ""  # why it cannot run anything
    collective: str = ""
    strategy: str = ""
    world_size: int = 0
    numel: int = 0
    dtype: str = ""
    root: int = 0
    codec: str = ""
    codec_text: str = ""  # fingerprint of what the codec is made from
    digest: str = ""  # of all that determines the program: options such as the block size show here
    host: str = field(default_factory=this_host)  # where it runs, and on how many cores: these may differ
    cores: int = field(default_factory=processors)


@dataclass(frozen=True, slots=True)
class _Verdict:
    mismatch: str = ""
    missing: int | None = None
    cause: str = ""
    shared_cores: int = 0


_Found = tuple[_Verdict, Exception | None]  # and what went wrong here


def agree(transport: Transport, claim: Claim, timeout_seconds: float) -> int:
    """Return when all ranks claim the same; raise `MismatchError`, or `TransportError` where a rank is missing.

    What is returned is the number of cores the ranks share if all of them are on one host, else 0.
    """
    if transport.world_size == 1:
        return 0
    decide = _decide if transport.rank == 0 else _ask
    verdict, failure = decide(transport, claim, timeout_seconds)
    if verdict.missing is not None:
        raise TransportError(claim.strategy, transport.rank, _COMPARING, verdict.missing, verdict.cause) from failure
    if verdict.mismatch:
        raise MismatchError(verdict.mismatch)
    return verdict.shared_cores


def difference(claims: Sequence[Claim]) -> str:
    """Say how the first claim that differs from rank 0's differs; empty where none does."""
    for rank, claim in enumerate(claims):
        if claim.error:
            return f"rank {rank} cannot take part: {claim.error}"
    for name in (one.name for one in fields(Claim) if one.name not in _MAY_DIFFER):
        for rank, claim in enumerate(claims):
            mine, theirs = getattr(claims[0], name), getattr(claim, name)
            if mine != theirs:
                what, advice = _WORDS.get(name, (name, "all ranks must make the same call"))
                what = what.format(codec=claim.codec)
                return f"{what} is {theirs!r} on rank {rank} and {mine!r} on rank 0; {advice}"
    return ""


def shared_cores(claims: Sequence[Claim]) -> int:
    """Return how many cores the ranks share if all of them are on one host, else 0."""
    return min(claim.cores for claim in claims) if len({claim.host for claim in claims}) == 1 else 0


def _decide(transport: Transport, claim: Claim, timeout_seconds: float) -> _Found:
    peers = range(1, transport.world_size)
    buffers = [np.zeros(_NBYTES, np.uint8) for _ in peers]
    verdict, failure = _collect(transport, claim, buffers, timeout_seconds * _PATIENCE)
    answer = _packed(asdict(verdict))
    with contextlib.suppress(TimeoutError, ConnectionError):  # a rank that cannot be told finds out by itself
        for work in [transport.isend(answer, peer, CHECK_TAG) for peer in peers if peer != verdict.missing]:
            work.wait(timeout_seconds * (1 - _PATIENCE))
    return verdict, failure


def _collect(transport: Transport, claim: Claim, buffers: list[Bytes], seconds: float) -> _Found:
    deadline = monotonic() + seconds
    peer = 1
    try:
        works = [transport.irecv(buffer, peer, CHECK_TAG) for peer, buffer in enumerate(buffers, 1)]
        for peer, work in enumerate(works, 1):  # noqa: B007  # named below
            work.wait(max(0.0, deadline - monotonic()))
    except (TimeoutError, ConnectionError) as error:
        return _missing(peer, error)
    claims = [claim, *(Claim(**_unpacked(buffer)) for buffer in buffers)]
    return _Verdict(difference(claims), shared_cores=shared_cores(claims)), None


def _ask(transport: Transport, claim: Claim, timeout_seconds: float) -> _Found:
    answer = np.zeros(_NBYTES, np.uint8)
    try:
        sending = transport.isend(_packed(asdict(claim)), 0, CHECK_TAG)
        receiving = transport.irecv(answer, 0, CHECK_TAG)
        sending.wait(timeout_seconds)
        receiving.wait(timeout_seconds)
    except (TimeoutError, ConnectionError) as error:
        return _missing(0, error)
    return _Verdict(**_unpacked(answer)), None


def _missing(peer: int, error: Exception) -> _Found:
    """Blame the peer whose message did not come, or the rank that died, where the engine knows it."""
    who = error.ranks[0] if isinstance(error, DeathError) else peer
    return _Verdict(missing=who, cause=f"it did not join this call: {error}"), error


def _packed(document: dict[str, object]) -> Bytes:
    """Return JSON of fixed size; texts are cut until it fits, since one letter may take twelve bytes."""
    letters, text = 2 * _LETTERS, " " * (_NBYTES + 1)
    while len(text) > _NBYTES:
        letters //= 2
        text = json.dumps({key: each[:letters] if isinstance(each, str) else each for key, each in document.items()})
    return np.frombuffer(text.encode("ascii").ljust(_NBYTES), np.uint8).copy()


def _unpacked(buffer: Bytes) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(buffer.tobytes())
    return document
