"""Writes `src/penstock/reproduce/measured.json`: the rows of our records that stand beside the papers' formulas.

Of each benchmark the newest record of each number of hosts, rate and speed, and of it every row with a formula.

python benchmarks/papers_measured.py
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.reproduce.claim import with_network
from run_all import STEP_RECORDS

RESULTS = Path(__file__).parent / "results"
TRACES = Path(__file__).parent / "traces"
SHIPPED = Path(__file__).parents[1] / "src" / "penstock" / "reproduce" / "measured.json"
Row = Mapping[str, Any]


def _is_ours(row: Row) -> bool:
    return bool(row["strategy"] != "native")  # of which no formula is known


def _is_published(row: Row) -> bool:
    return row["merges"] == "waited" and row["strategy"] in ("gtopk", "topk_allgather")


def _any(row: Row) -> bool:
    return True


_LINE = ("alpha_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte")
_SPARSE = ("hosts", "engine", "strategy", "density", "nbytes", "seconds", *_LINE)
_STEPS = ("hosts", "what", "how", "messages", "measured_seconds")
_REPLAYED = (*_STEPS, "a_seconds", "b_seconds_per_byte")
_CASYNC = ("rate", "slower", *_STEPS, "buckets", "lanes", "network")
_COLLECTIVES = ("hosts", "engine", "operation", "strategy", "nbytes", "seconds", *_LINE)
SELECTED: dict[str, tuple[Callable[[Row], bool], tuple[str, ...]]] = {
    "collectives-4-hosts-16-mb": (_is_ours, _COLLECTIVES),
    "collectives-2-8-hosts-16-mb": (_is_ours, _COLLECTIVES),
    "sparse-4-hosts": (_is_published, _SPARSE),
    "sparse-8-hosts": (_is_published, _SPARSE),
    "sparse-16-hosts": (_is_published, _SPARSE),
    "replay": (_any, _REPLAYED),
    "replay-8-hosts": (_any, _REPLAYED),
    "replay-8-hosts-large": (_any, _REPLAYED),
    "gains": (_any, (*_REPLAYED, "rate", "latency_seconds")),
    **dict.fromkeys(STEP_RECORDS, (_any, _CASYNC)),
    "gtop-k-table-7": (_any, ("hosts", "model", "method", "seconds", *_LINE)),
}


def selected() -> dict[str, Any]:
    """Return the document: of each record its name, date, and the chosen fields of the chosen rows; and traces.

    These are of the replayed models that `penstock.traces` does not have.
    """
    records = [_record(name, *chosen) for name, chosen in SELECTED.items()]
    models = sorted({row["what"] for each in records for row in each["rows"] if "what" in row})
    return {"records": records, "traces": {name: _trace(name) for name in models if name.endswith("-cpu")}}


def _trace(model: str) -> dict[str, Any]:
    trace = json.loads((TRACES / f"{model}.json").read_text())
    tensors = [[each["numel"], each["backward_seconds"]] for each in trace["tensors"]]
    return {"forward_seconds": trace["forward_seconds"], "tensors": tensors}


def _record(name: str, wanted: Callable[[Row], bool], fields: tuple[str, ...]) -> dict[str, Any]:
    record = json.loads((RESULTS / f"{name}.json").read_text())
    complete = (with_network(row, record) for row in record["rows"] if wanted(row))
    rows = [{field: row[field] for field in fields if row.get(field) is not None} for row in complete]
    return {"benchmark": record["benchmark"], "record": f"{name}.json", "date": record["date"], "rows": rows}


def _text(document: Mapping[str, Any]) -> str:
    """Return the document as JSON, a row and a trace a line."""
    records = ",\n".join(_record_text(each) for each in document["records"])
    traces = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in document["traces"].items())
    return f'{{"records": [\n{records}],\n"traces": {{\n{traces}}}}}\n'


def _record_text(record: Mapping[str, Any]) -> str:
    *head, (name, rows) = record.items()
    said = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f"{{{said}, {json.dumps(name)}: [\n{lines}]}}"


if __name__ == "__main__":
    SHIPPED.write_text(_text(selected()))
