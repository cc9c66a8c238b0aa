"""What the studies of this folder share: how a script and its ranks are started, and claims about its rows."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from penstock.cli.main import run
from penstock.cli.output import print_table

RANK = "--rank"  # the first argument of a script that is started as one rank of its study


def start(study: Callable[..., None], rank: Callable[[], None] | None = None) -> None:
    """Run a script: `python benchmarks/X.py OPTIONS` is the study, `... --rank JOB` one rank of it."""
    if rank is not None and sys.argv[1:2] == [RANK]:
        rank()
        return
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(study)
    run(app, f"python benchmarks/{Path(sys.argv[0]).name}")


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


def print_claims(claims: Sequence[Mapping[str, Any]]) -> None:
    """Print claims as a record keeps them, met and missed."""
    table = [
        (
            one["text"],
            f"{one['value']:.3g}",
            f"{'<=' if one['at_most'] else '>='} {one['wanted']:g}",
            "yes" if one["holds"] else "no",
        )
        for one in claims
    ]
    print_table("what these rows should show", ("claim", "found", "wanted", "holds"), table)
