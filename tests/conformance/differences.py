"""The table of differences between ours and stock (`differences.toml`), and what it says of an outcome."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from conformance.ranks import Outcome

TABLE = Path(__file__).with_name("differences.toml")


@dataclass(frozen=True)
class Difference:
    """A test that does not pass with ours and does with stock."""

    test: str
    flavours: tuple[str, ...]  # with which it differs
    outcome: str  # the kind: fail, crash, timeout
    says: str  # part of what it says
    reason: str  # why that is as it should be


def load() -> tuple[Difference, ...]:
    """Return all rows of the table."""
    rows = tomllib.loads(TABLE.read_text())["difference"]
    return tuple(Difference(**row | {"flavours": tuple(row["flavours"])}) for row in rows)


def complaint(test: str, flavour: str, outcome: Outcome, table: tuple[Difference, ...]) -> str:
    """Say what is wrong with how a test that stock passes ends with ours; nothing where it passes or has its row."""
    rows = [row for row in table if row.test == test and flavour in row.flavours]
    if not rows:
        return (
            "" if outcome.kind == "pass" else f"stock passes, ours does not, without a reason in the table: {outcome}"
        )
    if outcome.kind == "pass":
        return f"the table says that {flavour} differs, and it does not any more; take that out: {rows[0].reason}"
    if any(row.outcome == outcome.kind and row.says in outcome.says for row in rows):
        return ""
    return f"the table has another difference ({rows[0].outcome}: {rows[0].says!r}): {outcome}"
