"""A coverage-guided fuzzer in plain Python, for machines without atheris: `python coverage_fuzz.py 1000000`.

Inputs are made from a corpus by a few mutations (flip, set, cut, insert, splice). One in `LOOK` is run under a trace of
the lines of `penstock.codecs` and `penstock.compll.lower.payload_layout`; an input that reaches a line, or a pair of
lines one after the other, that none reached before joins the corpus. The cases themselves are those of
`fuzz_decode.py`.
"""

import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from codecs_fuzz_cases import CODECS, one_input

WATCHED = ("penstock/codecs/", "penstock/compll/lower/payload_layout.py")
LOOK = 400  # one input in so many is traced: tracing costs far more than the case itself
MAX_NBYTES = 256


def mutate(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """Return an input like another."""
    made = bytearray(data or b"\0\0")
    for _ in range(chance.randint(1, 4)):
        place, kind = chance.randrange(len(made)), chance.randrange(6)
        if kind == 0:
            made[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            made[place] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        elif kind == 2 and len(made) > 2:
            del made[place : place + chance.randint(1, 8)]
        elif kind == 3:
            made[place:place] = chance.randbytes(chance.randint(1, 8))
        elif kind == 4:
            made[place:] = other[chance.randrange(len(other) + 1) :]
        else:
            made[:2] = bytes((chance.randrange(len(CODECS)), chance.randrange(256)))
        made = made or bytearray(b"\0\0")
    return bytes(made[:MAX_NBYTES])


def reached(case: Callable[[bytes], None], data: bytes) -> set[tuple[str, int, int]]:
    """Return the steps from line to line that a case takes in the files watched."""
    found: set[tuple[str, int, int]] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in WATCHED):
            return None
        last = frame.f_lineno

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            found.add((name, last, frame.f_lineno))
            last = frame.f_lineno
            return line

        return line

    sys.settrace(trace)
    try:
        case(data)
    finally:
        sys.settrace(None)
    return found


def fuzz(cases: int, seed: int = 0, look: int = LOOK) -> tuple[int, int]:
    """Run so many cases; return the inputs in the corpus and the steps they reach."""
    chance = random.Random(seed)
    corpus = [bytes((number, kind)) + chance.randbytes(20) for number in range(len(CODECS)) for kind in range(8)]
    covered: set[tuple[str, int, int]] = set()
    for data in corpus:
        covered |= reached(one_input, data)
    for number in range(cases):
        data = mutate(chance.choice(corpus), chance.choice(corpus), chance)
        if number % look:
            one_input(data)
        elif not (steps := reached(one_input, data)) <= covered:
            covered |= steps
            corpus.append(data)
    return len(corpus), len(covered)


if __name__ == "__main__":
    start = time.perf_counter()
    inputs, steps = fuzz(int(sys.argv[1]))
    print(f"{sys.argv[1]} cases in {time.perf_counter() - start:.0f} s: {inputs} inputs reach {steps} steps")
