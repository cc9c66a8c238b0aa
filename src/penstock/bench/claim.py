"""One thing a benchmark was asked to show: a figure, what it should be, and whether it is."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Claim:
    """A measured ratio, or a count, beside what is wanted of it."""

    text: str
    value: float
    wanted: float
    at_most: bool = False  # otherwise: at least

    @property
    def holds(self) -> bool:
        """Say whether the value is what was wanted."""
        return self.value <= self.wanted if self.at_most else self.value >= self.wanted


def claim_documents(claims: Iterable[Claim]) -> list[dict[str, Any]]:
    """Return claims as a record keeps them."""
    return [asdict(claim) | {"holds": claim.holds} for claim in claims]
