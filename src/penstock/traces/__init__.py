"""Traces that come with penstock: ten models of the papers, by name.

A file's `times` field says whether its times are measured or estimated.
"""

import os
from importlib.resources import files

from penstock.errors import TraceError, did_you_mean
from penstock.fields import parse_json
from penstock.task_names import spelling
from penstock.trace import FORMAT, Trace, load_trace, trace_from_fields

__all__ = ["find_trace", "load_shipped", "shipped"]


def shipped() -> tuple[str, ...]:
    """Return the names of the shipped traces, sorted."""
    names = (entry.name for entry in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_shipped(name: str) -> Trace:
    """Return the shipped trace called `name`; `bert-base` and `BERT-base` mean `bert_base`."""
    found = _shipped_name(name)
    if found is None:
        near = did_you_mean(name, shipped())
        raise TraceError(f"no shipped trace is called {name!r}; wanted one of {', '.join(shipped())}{near}")
    file = files(__name__) / f"{found}.json"
    return parse_json(file.read_text(encoding="utf-8"), str(file), FORMAT, trace_from_fields)


def find_trace(name_or_path: str | os.PathLike[str]) -> Trace:
    """Return a shipped trace by name, else the trace in the JSON or CSV file at that path.

    A shipped name wins over a file of the same name in the working directory; `./resnet50` means the file.
    """
    text = os.fspath(name_or_path)
    if _shipped_name(text) is not None:
        return load_shipped(text)
    if not os.path.exists(text):
        near = did_you_mean(text, shipped())
        raise TraceError(f"{text!r} is neither a file nor a shipped trace; shipped are {', '.join(shipped())}{near}")
    return load_trace(text)


def is_shipped(name: str) -> bool:
    """Return whether a trace of that name is shipped."""
    return _shipped_name(name) is not None


def _shipped_name(name: str) -> str | None:
    """Return the shipped name that `name` spells, whatever its case, hyphens and underscores."""
    return next((candidate for candidate in shipped() if spelling(candidate) == spelling(name)), None)
