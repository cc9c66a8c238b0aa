"""What a benchmark was asked to show, and whether its record shows it: the lines below a table of the page."""

from collections.abc import Mapping, Sequence
from typing import Any


def claims_text(record: Mapping[str, Any]) -> str:
    """Return how many of a record's claims hold, each that does not with what it lacks, and the record's note."""
    claims: Sequence[Mapping[str, Any]] = record.get("claims") or ()
    missed = [claim for claim in claims if not claim["holds"]]
    lines = []
    if claims:
        held = f"{len(claims) - len(missed)} of {len(claims)}"
        lines += [f"Of what was asked, {held} holds" + (". Missed:\n" if missed else ".\n")]
        lines += [_line(claim) for claim in missed]
        lines += [""] if missed else []
    lines += [f"{record['note']}\n"] if record.get("note") else []
    return "".join(f"{line}\n" for line in lines)


def _line(claim: Mapping[str, Any]) -> str:
    """Return one missed claim.

    >>> _line({"text": "ring, speed over gloo's", "value": 0.873, "wanted": 0.97, "at_most": False})
    "- **ring, speed over gloo's: 0.873**, wanted at least 0.97: missed by 10%"
    >>> _line({"text": "memory", "value": 1.0132, "wanted": 1.01, "at_most": True})  # close ones with more digits
    '- **memory: 1.013**, wanted at most 1.01: missed by 0.3%'
    """
    value, wanted = claim["value"], claim["wanted"]
    side = "at most" if claim["at_most"] else "at least"
    missed = abs(value / wanted - 1)
    found, part = (f"{value:.3g}", f"{missed:.0%}") if missed >= 0.01 else (f"{value:.4g}", f"{missed:.1%}")
    return f"- **{claim['text']}: {found}**, wanted {side} {wanted:g}: missed by {part}"
