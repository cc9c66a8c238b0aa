"""A `Claim`: one published number, statement or formula and ours beside it, in one of three kinds.

- *checked*: something the paper prints, against what our programs, planners, codecs or traces give. It holds or not.
- *measured*: a formula of the paper, with constants measured on our machine, against a measurement on that machine. It
  says how far apart they are; what the paper measured on its own machines is not confirmed by it.
- *not here*: it cannot be checked here, and why.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """What a claim is compared with."""

    CHECKED = "checked against what the paper prints"
    MEASURED = "the paper's formula on our machine, against measurement"
    NOT_HERE = "not checkable here"


@dataclass(frozen=True, slots=True)
class Claim:
    """One row."""

    what: str
    kind: Kind
    published: str  # or, of a measured claim, what the formula gives
    ours: str  # or what was measured; empty where nothing is compared
    how: str  # computed, counted, simulated, encoded; or the record of a measurement
    tolerance: str  # and where it comes from
    verdict: str
    holds: bool | None = None  # of checked claims

    def document(self) -> dict[str, Any]:
        """Return the claim for `--json`."""
        return asdict(self) | {"kind": self.kind.value}


EXACT = "none: whole numbers, names or statements"
ARITHMETIC = 1e-6  # relative: two ways to add up the same floats
_ARITHMETIC_WORDS = "1e-6: rounding of sums"


def check_printed(what: str, printed: str, ours: float, how: str, why: str = "") -> Claim:
    """Compare with a printed number; it holds where ours is rounded to the same digits, or cut off after a `~`.

    >>> check_printed("x", "1.78", 1.7751, "computed").holds, check_printed("x", "25.5M", 25.56e6, "computed").holds
    (True, False)
    """
    number, unit, decimals = _parse(printed)
    digit = 10.0**-decimals
    allowed, part = (digit, "~: one") if printed.startswith("~") else (0.5 * digit, "half")
    words = f"{allowed:g}{_suffix(printed)}: {part} of the last printed digit"
    return _compared(what, printed, number * unit, ours, allowed * unit * (1 + 1e-9), words, how, why)


def check_within(what: str, printed: str, ours: float, allowed: float, origin: str, how: str, why: str = "") -> Claim:
    """Compare with a printed number, up to `allowed`, which `origin` explains."""
    number, unit, _ = _parse(printed)
    return _compared(what, printed, number * unit, ours, allowed, f"{allowed:.2g}: {origin}", how, why)


def check_number(what: str, published: float, ours: float, how: str, why: str = "") -> Claim:
    """Compare a number of a printed formula with ours, up to rounding of sums."""
    allowed = ARITHMETIC * abs(published)
    return _compared(what, f"{published:.6g}", published, ours, allowed, _ARITHMETIC_WORDS, how, why)


def check_equal(what: str, published: object, ours: object, how: str, why: str = "") -> Claim:
    """Compare what is equal or not: counts, choices, statements."""
    holds = published == ours
    verdict = "matches" if holds else f"differs: {why}"
    return Claim(what, Kind.CHECKED, str(published), str(ours), how, EXACT, verdict, holds)


def check_statement(what: str, says: bool, how: str, why: str = "") -> Claim:
    """Check a sentence of the paper: does it come out true?"""
    return check_equal(what, "yes", "yes" if says else "no", how, why)


def check_at_most(what: str, published: tuple[int, ...], ours: tuple[int, ...], how: str) -> Claim:
    """Check that none of our counts is above the printed one."""
    holds = all(own <= other for own, other in zip(ours, published, strict=True))
    verdict = "matches: no more" if holds else "differs: more"
    return Claim(what, Kind.CHECKED, str(published), str(ours), how, EXACT, verdict, holds)


def compare_measured(what: str, formula: float, measured: float, record: str) -> Claim:
    """Set a measurement beside what the paper's formula gives with the constants of the machine it was taken on."""
    off = 100 * (measured / formula - 1)
    verdict = f"measured {off:+.1f}% from the formula"
    return Claim(what, Kind.MEASURED, f"{formula:.4g}", f"{measured:.4g}", record, "none: not a verdict", verdict)


def not_here(what: str, why: str, published: str = "") -> Claim:
    """List what cannot be checked here."""
    return Claim(what, Kind.NOT_HERE, published, "", "", "", f"not checked: {why}")


def counts(claims: Sequence[Claim]) -> str:
    """Say how many claims there are of each kind, and how many checked ones hold."""
    of = {kind: [claim for claim in claims if claim.kind is kind] for kind in Kind}
    held = sum(claim.holds is True for claim in of[Kind.CHECKED])
    checked = len(of[Kind.CHECKED])
    return (
        f"{checked} checked against what the papers print: {held} hold, {checked - held} differ; "
        f"{len(of[Kind.MEASURED])} formulas beside measurements of ours; {len(of[Kind.NOT_HERE])} not checkable here"
    )


def _compared(
    what: str, printed: str, published: float, ours: float, allowed: float, words: str, how: str, why: str
) -> Claim:
    holds = abs(ours - published) <= allowed
    off, unit = (ours - published, " points") if printed.endswith("%") else (100 * (ours / published - 1), "%")
    verdict = "matches" if holds else f"differs by {off:+.{1 if abs(off) >= 0.05 else 3}f}{unit}: {why}"
    return Claim(what, Kind.CHECKED, printed, f"{ours:.6g}", how, words, verdict, holds)


_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "%": 1.0, "x": 1.0}


def _parse(printed: str) -> tuple[float, float, int]:
    """Return the number, its unit and how many decimals it has."""
    match = re.fullmatch(r"~?(-?\d+)(?:\.(\d+))?([KM%x]?)", printed)
    assert match, printed
    return float(printed.strip("~KM%x")), _UNITS[match[3]], len(match[2] or "")


def _suffix(printed: str) -> str:
    return printed[-1] if printed[-1] in _UNITS else ""
