"""Prints what a benchmark was asked to show, and whether it does."""

from collections.abc import Mapping, Sequence
from typing import Any


def print_claims(claims: Sequence[Mapping[str, Any]]) -> None:
    """Print claims as a record keeps them, met and missed."""
    from penstock.cli.output import print_table

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
