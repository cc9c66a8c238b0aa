"""Puts figures of benchmark records into pages written by hand, so that they cannot be out of date.

A page holds the place open with `<!-- quote NAME -->` and `<!-- end -->`, with an empty line inside each; what stands
between them is made from the records by `QUOTES[NAME]`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.report.benchmark_quotes import QUOTES

_PLACE = re.compile(r"(<!-- quote (\S+) -->\n\n).*?(\n\n<!-- end -->)", flags=re.DOTALL)


def quoted(text: str, records: Mapping[str, Mapping[str, Any]], where: str) -> str:
    """Return a page with all its quotes made anew; one whose records are not there stays as it is."""

    def fill(place: re.Match[str]) -> str:
        if place[2] not in QUOTES:
            raise PenstockError(f"{where}: quote {place[2]!r}; wanted one of {', '.join(QUOTES)}")
        quote = QUOTES[place[2]]
        if not all(name in records for name in quote.files):
            return place[0]
        try:
            return place[1] + quote.write(*(records[name] for name in quote.files)) + place[3]
        except KeyError as error:
            files = ", ".join(quote.files)
            raise PenstockError(
                f"{where}: quote {place[2]!r}: nothing about {error} in {files}; measure it too"
            ) from None

    return _PLACE.sub(fill, text)


def update_pages(pages: Sequence[Path], records: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Make the quotes of pages anew, and return those that changed."""
    changed = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        new = quoted(text, records, str(page))
        if new != text:
            page.write_text(new, encoding="utf-8")
            changed.append(page)
    return changed


def pages_with_quotes(docs: Path) -> list[Path]:
    """Return the pages of a folder that quote something, and the README beside the folder where it does."""
    readme = docs.parent / "README.md"
    candidates = [*([readme] if readme.is_file() else []), *sorted(docs.rglob("*.md"))]
    return [page for page in candidates if _PLACE.search(page.read_text(encoding="utf-8"))]
