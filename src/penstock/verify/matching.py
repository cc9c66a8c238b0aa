"""The second stage of a proof: every send has its recv, of the same size and kind, in the same order.

The k-th send from one rank to another belongs to the k-th recv there. That pairs all messages before anything runs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.program import Op, Program
from penstock.verify.findings import Finding, Kind, blame, quote

Key = tuple[int, int]  # (rank, instruction index)


@dataclass(frozen=True, slots=True)
class Matching:
    """Which send goes with which recv, as far as they fit."""

    recv_of: dict[Key, Key]
    send_of: dict[Key, Key]
    natives: list[list[Key]]  # call k on every rank


def match(program: Program) -> tuple[Matching, list[Finding]]:
    """Pair sends and recvs; say which have no partner or one that does not fit."""
    sends, recvs = _by_link(program, Op.SEND), _by_link(program, Op.RECV)
    findings: list[Finding] = []
    recv_of: dict[Key, Key] = {}
    for link in sorted(sends.keys() | recvs.keys()):
        unmatched = list(_unmatched(program, link, sends[link], recvs[link]))
        fitting = _fitting(program, sends[link], recvs[link])
        if not unmatched and fitting < len(sends[link]):
            findings.append(_misfit(program, link, sends[link], recvs[link], fitting))
        findings += unmatched
        recv_of |= dict(zip(sends[link][:fitting], recvs[link][:fitting], strict=True))
    natives, missing = _match_natives(program)
    return Matching(recv_of, {recv: send for send, recv in recv_of.items()}, natives), findings + missing


def _by_link(program: Program, op: Op) -> defaultdict[tuple[int, int], list[Key]]:
    """Return the sends or recvs of each (source, target) in order."""
    found: defaultdict[tuple[int, int], list[Key]] = defaultdict(list)
    for rank, instructions in enumerate(program.ranks):
        for index, one in enumerate(instructions):
            if one.op is op:
                assert one.peer is not None
                found[(rank, one.peer) if op is Op.SEND else (one.peer, rank)].append((rank, index))
    return found


def _unmatched(program: Program, link: tuple[int, int], sends: list[Key], recvs: list[Key]) -> Iterator[Finding]:
    counts = f"{link[0]} -> {link[1]} has {len(sends)} sends and {len(recvs)} recvs"
    for rank, index in sends[len(recvs) :]:
        yield blame(program, Kind.UNMATCHED_SEND, rank, index, f"is received by no rank: {counts}")
    for rank, index in recvs[len(sends) :]:
        yield blame(program, Kind.UNMATCHED_RECV, rank, index, f"waits for a message that no rank sends: {counts}")


def _fitting(program: Program, sends: list[Key], recvs: list[Key]) -> int:
    """Return how many messages of a link fit; what follows the first that does not is a consequence."""
    pairs = list(zip(sends, recvs, strict=False))
    fits = [_shape(program, send) == _shape(program, recv) for send, recv in pairs]
    return fits.index(False) if False in fits else len(pairs)


def _misfit(program: Program, link: tuple[int, int], sends: list[Key], recvs: list[Key], count: int) -> Finding:
    """Name what is wrong with message `count` of a link."""
    sent, wanted = ([_shape(program, key) for key in keys] for keys in (sends, recvs))
    rank, index = sends[count]
    partner = quote(program.ranks[link[1]][recvs[count][1]])
    detail = f"is message {count} of {link[0]} -> {link[1]} and meets `{partner}` ({_words(wanted[count])})"
    return blame(program, _kind(sent, wanted), rank, index, f"({_words(sent[count])}) {detail}")


def _kind(sent: list[tuple[int, bool]], wanted: list[tuple[int, bool]]) -> Kind:
    if Counter(sent) == Counter(wanted):
        return Kind.MISORDERED
    return Kind.ENCODING if [one[0] for one in sent] == [one[0] for one in wanted] else Kind.SIZE_MISMATCH


def _shape(program: Program, key: Key) -> tuple[int, bool]:
    """Return the number of elements and whether they are encoded."""
    instruction = program.ranks[key[0]][key[1]]
    touched = instruction.read if instruction.op is Op.SEND else instruction.write
    assert touched is not None
    return touched.numel, program.buffer(touched.buffer).encoded


def _words(shape: tuple[int, bool]) -> str:
    return f"{shape[0]} {'encoded' if shape[1] else 'dense'} elements"


def _match_natives(program: Program) -> tuple[list[list[Key]], list[Finding]]:
    calls = [[(r, i) for i, one in enumerate(rank) if one.op is Op.NATIVE] for r, rank in enumerate(program.ranks)]
    most = max(calls, key=len)
    findings = []
    for rank, own in enumerate(calls):
        if len(own) < len(most):
            other, index = most[len(own)]
            detail = f"is call {len(own)} of the engine's collective and rank {rank} never makes it"
            findings.append(blame(program, Kind.UNMATCHED_NATIVE, other, index, detail))
        for key, reference in zip(own, most, strict=False):
            ours, theirs = program.ranks[rank][key[1]], program.ranks[reference[0]][reference[1]]
            if ours.write != theirs.write:
                detail = f"meets `{quote(theirs)}` of rank {reference[0]}"
                findings.append(blame(program, Kind.SIZE_MISMATCH, rank, key[1], detail))
    whole = 0 if findings else len(most)
    return [[own[count] for own in calls] for count in range(whole)], findings
