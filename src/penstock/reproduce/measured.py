"""Measurements of ours that stand beside the papers' formulas: rows of `benchmarks/results`, shipped with the package.

`benchmarks/papers_measured.py` writes the file from the records. All were taken on one machine: hosts are network
namespaces with token-bucket links of 1 Gb/s, ranks share its cores.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """One row of a record, and which record it is from."""

    record: str
    row: Mapping[str, Any]


def measured_rows(benchmark: str, record: Mapping[str, Any] | None = None) -> list[Measured]:
    """Return the shipped rows of a benchmark, or those of a user's `record` of it."""
    if record is not None and record["benchmark"].startswith(benchmark):
        return [Measured("the given record", row) for row in record["rows"]]
    return [
        Measured(each["record"], row) for each in _shipped() if each["benchmark"] == benchmark for row in each["rows"]
    ]


@cache
def _shipped() -> list[Mapping[str, Any]]:
    text = (resources.files("penstock.reproduce") / "measured.json").read_text()
    records: list[Mapping[str, Any]] = json.loads(text)["records"]
    return records
