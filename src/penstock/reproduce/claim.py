"""A `Claim`: one published number and ours."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Claim:
    """One number of a paper, recomputed."""

    what: str
    published: str
    ours: str
    how: str  # computed, simulated, emulated or replayed
    verdict: str  # "matches", "matches within x%", or "differs: why"

    def document(self) -> dict[str, Any]:
        """Return the claim for `--json`."""
        return asdict(self)


def compare_numbers(what: str, published: float, ours: float, how: str, tolerance: float, why: str = "") -> Claim:
    """Return the claim for one number; beyond `tolerance` (relative) it differs, because of `why`."""
    off = abs(ours / published - 1)
    verdict = f"matches within {100 * off:.1f}%" if off <= tolerance else f"differs by {100 * off:.1f}%: {why}"
    return Claim(what, f"{published:g}", f"{ours:.4g}", how, verdict)


def compare_exactly(what: str, published: object, ours: object, how: str, why: str = "") -> Claim:
    """Return the claim for something that is equal or not."""
    verdict = "matches" if published == ours else f"differs: {why}"
    return Claim(what, str(published), str(ours), how, verdict)
