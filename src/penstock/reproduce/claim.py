"""A `Claim`: one published number, statement or formula and ours beside it, in one of four kinds.

- *checked*: a number, formula or sentence that the paper prints, against what our programs, planners, codecs or traces
  give. It holds or does not.
- *own*: numbers of the paper against one another, by its own formulas. Nothing of ours is compared.
- *measured*: a formula or schedule of the paper, computed now with constants that were measured on our hosts, against
  a measurement on the same hosts. The row says how far apart they are; it does not confirm the paper's measurements.
- *not here*: what cannot be checked here, and the reason.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from penstock.trace import Tensor, Trace
from penstock.traces import load_shipped


class Kind(Enum):
    """What a claim is compared with."""

    CHECKED = "checked against what the paper prints"
    OWN = "the paper's numbers against one another"
    MEASURED = "the paper's formula or schedule on our machine, against measurement"
    NOT_HERE = "not checkable here"


@dataclass(frozen=True, slots=True)
class Claim:
    """One row."""

    key: str  # table, figure or section, and which row of it; stays where wording and numbers change
    what: str
    kind: Kind
    published: str  # or, of a measured claim, what the formula gives; with its source where it is not printed so
    ours: str  # or what was measured, or what the paper's other numbers give; empty where nothing is compared
    how: str  # computed, counted, simulated, encoded; or the record of a measurement
    tolerance: str  # and where it comes from
    verdict: str
    holds: bool | None = None  # of checked claims, and of the paper's own numbers

    def document(self) -> dict[str, Any]:
        """Return the claim for `--json`."""
        return asdict(self) | {"kind": self.kind.value}


EXACT = "none: whole numbers, names or statements"
ARITHMETIC = 1e-6  # relative: two ways to add up the same floats
ARITHMETIC_WORDS = "1e-6: rounding of sums"
_ROUNDING_WORDS = "the rounding of all printed numbers"
MATCHES, NO_MORE = "matches", "no more than printed"


def check_printed(
    key: str,
    what: str,
    printed: str | Sequence[str],
    ours: float | Sequence[float],
    how: str,
    why: str = "",
    source: str = "",
) -> Claim:
    """Compare with one printed number or several; they hold where ours are rounded to the same digits.

    After a `~` the paper cuts off, so that ours may be larger by less than a unit of the last digit, and not smaller.
    `source` says where a number stands that is not printed as it is written here.

    >>> check_printed("x", "x", "1.78", 1.7751, "computed").holds
    True
    >>> check_printed("x", "x", "25.5M", 25.56e6, "counted").holds
    False
    """
    texts = [printed] if isinstance(printed, str) else list(printed)
    found = [ours] if isinstance(ours, int | float) else list(ours)
    holds = all(rounded(text)[0] <= own <= rounded(text)[1] for text, own in zip(texts, found, strict=True))
    differences = ", ".join(_difference(text, own) for text, own in zip(texts, found, strict=True))
    return Claim(
        key,
        what,
        Kind.CHECKED,
        ", ".join(texts) + (f" ({source})" if source else ""),
        ", ".join(f"{own:.6g}" for own in found),
        how,
        _tolerance(texts),
        MATCHES if holds else f"differs by {differences}: {why}",
        holds,
    )


def check_number(key: str, what: str, published: float, ours: float, how: str, why: str = "") -> Claim:
    """Compare a number of a printed formula with ours, up to rounding of sums."""
    holds = abs(ours - published) <= ARITHMETIC * abs(published)
    verdict = MATCHES if holds else f"differs by {_percent(ours, published)}: {why}"
    return Claim(
        key, what, Kind.CHECKED, f"{published:.6g}", f"{ours:.6g}", how, ARITHMETIC_WORDS, verdict, holds
    )  # fmt: skip


def check_equal(key: str, what: str, published: object, ours: object, how: str, why: str = "") -> Claim:
    """Compare what is equal or not: counts, choices, statements."""
    holds = published == ours
    verdict = MATCHES if holds else f"differs: {why}"
    return Claim(key, what, Kind.CHECKED, str(published), str(ours), how, EXACT, verdict, holds)


def check_statement(
    key: str, what: str, says: bool, how: str, found: str = "", why: str = "", tolerance: str = EXACT
) -> Claim:
    """Check a sentence of the paper: does it come out true? `found` are the numbers behind our answer."""
    ours = ("yes" if says else "no") + (f": {found}" if found else "")
    verdict = MATCHES if says else f"differs: {why}"
    return Claim(key, what, Kind.CHECKED, "yes", ours, how, tolerance, verdict, says)


def check_at_most(key: str, what: str, published: tuple[int, ...], ours: tuple[int, ...], how: str) -> Claim:
    """Check that none of our counts is above the printed one; it says nothing of how far they are below."""
    holds = all(own <= other for own, other in zip(ours, published, strict=True))
    verdict = NO_MORE if holds else "differs: more than printed"
    return Claim(key, what, Kind.CHECKED, str(published), str(ours), how, "one-sided: ours may be less", verdict, holds)


def compare_own(
    key: str, what: str, printed: str | Sequence[str], follows: Sequence[tuple[float, float]], how: str, why: str = ""
) -> Claim:
    """Compare printed numbers with the least and the most that other numbers of the same paper allow for them."""
    texts = [printed] if isinstance(printed, str) else list(printed)
    pairs = [(rounded(text), allowed) for text, allowed in zip(texts, follows, strict=True)]
    holds = all(low <= most and least <= high for (low, high), (least, most) in pairs)
    ranges = ", ".join(_range(*allowed) for allowed in follows)
    verdict = "agree" if holds else f"disagree: {why}"
    is_wide = any(least < most for least, most in follows)
    tolerance = _ROUNDING_WORDS if is_wide else f"{_tolerance(texts)}, the others as printed"
    return Claim(key, what, Kind.OWN, ", ".join(texts), ranges, how, tolerance, verdict, holds)


def compare_measured(key: str, what: str, formula: float, measured: float, record: str) -> Claim:
    """Set a measurement beside what the paper's formula gives with the constants of the machine it was taken on."""
    verdict = f"measured {_percent(measured, formula)} from the formula"
    return Claim(
        key, what, Kind.MEASURED, f"{formula:.4g}", f"{measured:.4g}", record, "none: not a verdict", verdict
    )  # fmt: skip


def not_here(key: str, what: str, why: str, published: str = "") -> Claim:
    """List what cannot be checked here."""
    return Claim(key, what, Kind.NOT_HERE, published, "", "", "", f"not checked: {why}")


def counts(claims: Sequence[Claim]) -> str:
    """Say how many claims there are of each kind, and how many checked ones hold."""
    of = {kind: [claim for claim in claims if claim.kind is kind] for kind in Kind}
    checked, own = of[Kind.CHECKED], of[Kind.OWN]
    match, below = (sum(claim.verdict == verdict for claim in checked) for verdict in (MATCHES, NO_MORE))
    agree = sum(claim.holds is True for claim in own)
    return (
        f"{len(checked)} checked against what the papers print: {match} match, {below} are no more than printed, "
        f"{len(checked) - match - below} differ; {len(of[Kind.MEASURED])} formulas beside measurements of ours; "
        f"{len(of[Kind.NOT_HERE])} not checkable here; {len(own)} comparisons of the papers' own numbers: {agree} "
        f"agree, {len(own) - agree} do not"
    )


class Measured(NamedTuple):
    """One row of a record, and which record it is from."""

    record: str
    row: Mapping[str, Any]


def measured_rows(benchmark: str, record: Mapping[str, Any] | None = None) -> list[Measured]:
    """Return the rows of `benchmarks/results` that are shipped of a benchmark, or those of a user's `record` of it.

    `benchmarks/papers_measured.py` writes the file from the records. All were taken on one machine: hosts are network
    namespaces with token-bucket links of 1 Gb/s, ranks share its cores.
    """
    if record is not None and record["benchmark"].startswith(benchmark):
        return [Measured("the given record", with_network(row, record)) for row in record["rows"]]
    return [
        Measured(each["record"], row) for each in _shipped() if each["benchmark"] == benchmark for row in each["rows"]
    ]


def with_network(row: Mapping[str, Any], record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with the network that it is to be simulated on in place of its number, as far as its plan goes."""
    if "buckets" not in row:
        return row
    where = {"hosts": row["hosts"], "rate": row["rate"], "slower": row.get("slower"), "trace": row["what"]}
    entry = next(each for each in record["networks"] if all(each.get(key) == value for key, value in where.items()))
    network = entry["networks"][row["network"]]
    lines = {route: line for route, line in network["all_reduce"].items() if route in row["routes"].split(", ")}
    return {**row, "network": network | {"all_reduce": lines}}


def measured_trace(name: str) -> Trace:
    """Return a trace that was replayed: one that is shipped by itself, or one of a CPU beside the measurements."""
    found = _document()["traces"].get(name)
    if found is None:
        return load_shipped(name)
    tensors = (Tensor(str(index), *values) for index, values in enumerate(found["tensors"]))
    return Trace(name, "CPU", 1, "float32", found["forward_seconds"], tuple(tensors))


def _shipped() -> list[Mapping[str, Any]]:
    records: list[Mapping[str, Any]] = _document()["records"]
    return records


@cache
def _document() -> Mapping[str, Any]:
    document: Mapping[str, Any] = json.loads((resources.files("penstock.reproduce") / "measured.json").read_text())
    return document


_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "%": 1.0, "x": 1.0}


def _parse(printed: str) -> tuple[float, float]:
    """Return the number and a unit of its last digit."""
    match = re.fullmatch(r"~?(-?\d+)(?:\.(\d+))?([KM%x]?)", printed)
    assert match, printed
    unit = _UNITS[match[3]]
    return unit * float(printed.strip("~KM%x")), unit * 10.0 ** -len(match[2] or "")


def rounded(printed: str) -> tuple[float, float]:
    """Return the least and the largest number that is printed like this: half a unit of the last digit off."""
    number, digit = _parse(printed)
    if printed.startswith("~"):
        return number, number + digit * (1 - 1e-9)
    slack = digit * (0.5 + 1e-9)
    return number - slack, number + slack


def quotient(one: str, other: str) -> tuple[float, float]:
    """Return the least and the largest ratio of two printed numbers."""
    (low, high), (least, most) = rounded(one), rounded(other)
    return low / most, high / least


def _tolerance(texts: Sequence[str]) -> str:
    words = []
    for text in texts:
        digit = _parse(text.strip("%xKM"))[1]
        suffix = text[-1] if text[-1] in _UNITS else ""
        cut = text.startswith("~")
        words.append(f"+{digit:g}{suffix}: cut off" if cut else f"{digit / 2:g}{suffix}: half")
    return f"{'; '.join(dict.fromkeys(words))} {'after' if texts[0].startswith('~') else 'of'} the last printed digit"


def _range(least: float, most: float) -> str:
    low, high = f"{least:.3g}", f"{most:.3g}"
    return low if low == high else f"{low} to {high}"


def _difference(printed: str, ours: float) -> str:
    number, _ = _parse(printed)
    return f"{ours - number:+.1f} points" if printed.endswith("%") else _percent(ours, number)


def _percent(ours: float, published: float) -> str:
    off = 100 * (ours / published - 1)
    return f"{off:+.{1 if abs(off) >= 0.05 else 3}f}%"
