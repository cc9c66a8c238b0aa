"""Printing results: a rich table for people, JSON for programs; never both."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.errors import printable
from penstock.fields import json_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def print_json(document: Any) -> None:
    """Print `document` as JSON on standard output."""
    print(json_text(document, "--json", indent=1))


def print_lines(text: object) -> None:
    """Print text that may hold names from files, so that a terminal does not obey them."""
    print(printable(str(text)))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], note: str = "") -> None:
    """Print a table; columns whose cells are numbers are set to the right. Names in it may come from files."""
    from rich.console import Console
    from rich.table import Table

    above, below = plain(title, "table.title"), plain(note, "table.caption") if note else None
    table = Table(title=above, title_justify="left", caption=below, caption_justify="left")
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) for row in rows)
        table.add_column(plain(column), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(plain(format_cell(cell)) for cell in row))
    width = None if sys.stdout.isatty() else 160  # do not fold tables that go to a file
    Console(width=width).print(table)


def plain(text: str, style: str = "") -> "Text":
    """Return words for rich as they are: brackets in a name are no markup, and nothing in it is obeyed."""
    from rich.text import Text

    return Text(printable(text), style)


def stderr_console() -> "Console":
    """Return a console on standard error, for progress that must not mix with results."""
    from rich.console import Console

    return Console(stderr=True)


def format_cell(value: object) -> str:
    """Return a number with four significant digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_seconds(seconds: float) -> str:
    """Return a time in the unit a person would use.

    >>> format_seconds(0.0123)
    '12.3 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


@contextmanager
def progress(title: str, total: int, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show a bar for the length of a `with` block; call what it yields once per step, with the step's name."""
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=stderr_console(), transient=True, disable=not shown) as bar:
        task = bar.add_task(title, total=total)

        def done(name: str) -> None:
            bar.update(task, advance=1, description=escape(f"{title}: {name}"))

        yield done
