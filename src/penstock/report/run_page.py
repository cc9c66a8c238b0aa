"""The report as one HTML file: template, style, scripts and data in one, nothing fetched from anywhere."""

import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

SCRIPTS = (  # in the order in which they use one another
    "format.js", "dom.js", "axes.js", "cost.js", "ways.js", "planner.js", "methods.js", "curves.js", "breakdown.js",
    "timeline_paint.js", "timeline.js", "buckets.js", "sliders.js", "whatif.js", "main.js",
)  # fmt: skip


def make_page(document: Mapping[str, Any]) -> str:
    """Return the page of a report's data."""
    parts = {
        "@TITLE@": escape(str(document["title"])),
        "@STYLE@": read_part("style.css"),
        "@SCRIPT@": "\n".join(read_part(name) for name in SCRIPTS),
        "@DATA@": embedded_json(document),
    }
    # in one pass, so that a mark inside the data is not taken for a part
    return re.sub("|".join(parts), lambda mark: parts[mark.group()], read_part("page.html"))


def read_part(name: str) -> str:
    """Return one of the files that a page is made of."""
    return files("penstock.report").joinpath("html", name).read_text(encoding="utf-8")


def embedded_json(document: Mapping[str, Any]) -> str:
    """Return JSON that can stand inside a script element: no `<` of a name can end the element."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
