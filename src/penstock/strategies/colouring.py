"""Turns for links, so that no rank sends twice or receives twice in the same turn.

Links with a source and a target are the edges of a two-sided graph: senders on one side, receivers on the other. If
no rank has more than D links out or in, D turns are enough (König 1916). The proof is the algorithm: give links turns
one by one; where a link's ends have no free turn in common, swap two turns along the chain that is in the way.
"""

from collections import Counter
from collections.abc import Sequence

Link = tuple[int, int]  # (source, target); the same pair may occur more than once
_End = tuple[str, int]


def turns(links: Sequence[Link]) -> tuple[list[int], int]:
    """Return a turn for every link, and the number of turns: the most links that one rank has in one direction."""
    degrees = Counter(end for link in links for end in _ends(link))
    count = max(degrees.values(), default=0)
    taken: dict[tuple[_End, int], int] = {}  # (end, turn): link
    chosen: list[int] = []
    for index, link in enumerate(links):
        out, into = (next(turn for turn in range(count) if (end, turn) not in taken) for end in _ends(link))
        if out != into:
            _swap(links, chosen, taken, _ends(link)[1], out, into)
        chosen.append(out)
        for end in _ends(link):
            taken[end, out] = index
    return chosen, count


def _ends(link: Link) -> tuple[_End, _End]:
    return ("out", link[0]), ("in", link[1])


def _swap(
    links: Sequence[Link], chosen: list[int], taken: dict[tuple[_End, int], int], end: _End, one: int, other: int
) -> None:
    """Free turn `one` at `end`, where `other` is free, by swapping both along the chain that starts there.

    The chain cannot come back to the new link's other end: it would arrive there with turn `one`, which is free.
    """
    chain = []
    turn = one
    while (end, turn) in taken:
        index = taken[end, turn]
        chain.append(index)
        end = next(far for far in _ends(links[index]) if far != end)
        turn = one + other - turn
    for index in chain:
        for touched in _ends(links[index]):
            del taken[touched, chosen[index]]
    for index in chain:
        chosen[index] = one + other - chosen[index]
        for touched in _ends(links[index]):
            taken[touched, chosen[index]] = index
