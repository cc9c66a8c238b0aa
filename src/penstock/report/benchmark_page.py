"""The page of benchmarks, made from the JSON records alone: nothing on it is typed by hand."""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock.bench.record import FORMAT
from penstock.errors import FormatError, PenstockError
from penstock.report.benchmark_claims import claims_text
from penstock.report.benchmark_pictures import draw_benchmarks
from penstock.report.benchmark_sections import position, section_of
from penstock.report.benchmark_tables import markdown_table

Record = Mapping[str, Any]
_FIELDS = ("benchmark", "date", "command", "commit", "machine", "versions", "rows")
_HEAD = """# Benchmarks

Made by `penstock bench page` from the records in [benchmarks/results]({results}); `make bench`
measures anew what needs no GPU and fits into half an hour.
Times are medians, `spread` is maximum - minimum. Rows in which a peer is faster than we are say so, in bold.
"""


def load_records(folder: Path) -> dict[str, Record]:
    """Return the records of a folder by file name, in the order of the page."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise PenstockError(
            f"no benchmark records in {folder}; wanted .json files written by `penstock bench NAME --out`"
        )
    records = {path.name: load_record(path) for path in paths}
    return dict(sorted(records.items(), key=lambda item: (position(item[1]["benchmark"]), len(item[0]), item[0])))


def load_record(path: Path) -> Record:
    """Return one record, checked."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FormatError(str(path), "file", str(error), f"a {FORMAT} file") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise FormatError(str(path), "format", record.get("format") if isinstance(record, dict) else record, FORMAT)
    for name in _FIELDS:
        if name not in record:
            raise FormatError(str(path), name, "nothing", f"the field that every {FORMAT} file has")
    return record


def make_page(records: Mapping[str, Record], results: str, pictures: Mapping[str, str]) -> str:
    """Return the page; `results` leads from it to the records, `pictures` maps a benchmark to its picture."""
    parts = [_HEAD.format(results=results)]
    for benchmark, files in groupby(records, key=lambda name: records[name]["benchmark"]):
        section = section_of(benchmark)
        parts.append(f"## {section.title}\n")
        parts += [f"{section.text}\n"] if section.text else []
        parts += [f"![{section.title}]({pictures[benchmark]})\n"] if benchmark in pictures else []
        for name in files:
            parts.append(_record_text(name, records[name], results))
    return "\n".join(parts)


def _record_text(name: str, record: Record, results: str) -> str:
    section = section_of(record["benchmark"])
    rows: Sequence[Mapping[str, Any]] = record["rows"]
    table = markdown_table(rows, section.rivalry, section.hidden, section.shares) if rows else "No rows.\n"
    return f"{table}\n{claims_text(record)}{_provenance(name, record, results)}\n{_startup(record)}"


def _startup(record: Record) -> str:
    """Return the table of start-up times, where a record has one."""
    if (found := record.get("startup")) is None:
        return ""
    source = f"`{found['command']}`, {found['date']}, commit {found['commit']}."
    text = (
        "Until the plan is in force: `ready` from the making of the wrapper on, profiled iterations included, `held` "
        "what of that training stood still. `cold`: nothing kept; `warm`: compiled kernels and measurements are."
    )
    return f"{text}\n\n{markdown_table(found['rows'], None)}\n{source}\n\n"


def _provenance(name: str, record: Record, results: str) -> str:
    """Return where the figures come from."""
    machine = record["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    where = (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}"
    )
    what = f"[{name}]({results}/{name}): `{record['command']}`"
    return f"{what}, {record['date']}, commit {record['commit']}. {where}; {versions}.\n"


def write_page(records: Mapping[str, Record], results: Path, out: Path) -> list[Path]:
    """Draw the pictures, write the page to `out`, and return the pictures' paths."""
    rows: dict[str, list[Any]] = {}
    for record in records.values():
        rows.setdefault(record["benchmark"], []).extend(record["rows"])
    out.parent.mkdir(parents=True, exist_ok=True)
    pictures = draw_benchmarks(rows, out.parent / "pictures")
    links = {benchmark: f"pictures/{path.name}" for benchmark, path in pictures.items()}
    out.write_text(make_page(records, os.path.relpath(results, out.parent), links))
    return list(pictures.values())
