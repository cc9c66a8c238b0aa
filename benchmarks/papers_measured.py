"""Writes `src/penstock/reproduce/measured.json`: the rows of our records that stand beside the papers' formulas.

python benchmarks/papers_measured.py
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SHIPPED = Path(__file__).parents[1] / "src" / "penstock" / "reproduce" / "measured.json"
Row = Mapping[str, Any]


def _is_large(row: Row) -> bool:
    return row["nbytes"] == 16_000_000 and row["predicted_seconds"] is not None


def _is_sparse(row: Row) -> bool:
    return row["density"] == 0.001 and row["merges"] == "waited" and row["strategy"] in ("gtopk", "topk_allgather")


def _any(row: Row) -> bool:
    return True


_LINE = ("alpha_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte")
_SPARSE = ("hosts", "engine", "strategy", "nbytes", "seconds", *_LINE)
_STEPS = ("hosts", "what", "how", "messages", "measured_seconds", "simulated_seconds")
_COLLECTIVES = ("hosts", "engine", "operation", "strategy", "nbytes", "seconds", *_LINE)
SELECTED: dict[str, tuple[Callable[[Row], bool], tuple[str, ...]]] = {
    "collectives-4-hosts-16-mb": (_is_large, _COLLECTIVES),
    "sparse-4-hosts": (_is_sparse, _SPARSE),
    "sparse-8-hosts": (_is_sparse, _SPARSE),
    "sparse-16-hosts": (_is_sparse, _SPARSE),
    "replay": (_any, _STEPS),
    "casync-vgg-4-hosts": (_any, _STEPS),
    "casync-bert-4-hosts": (_any, _STEPS),
    "gtop-k-table-7": (_any, ("hosts", "model", "method", "seconds", *_LINE)),
}


def selected() -> dict[str, Any]:
    """Return the document: of each record its name, date, and the chosen fields of the chosen rows."""
    return {"records": [_record(name, *chosen) for name, chosen in SELECTED.items()]}


def _record(name: str, wanted: Callable[[Row], bool], fields: tuple[str, ...]) -> dict[str, Any]:
    record = json.loads((RESULTS / f"{name}.json").read_text())
    rows = [{field: row.get(field) for field in fields} for row in record["rows"] if wanted(row)]
    return {"benchmark": record["benchmark"], "record": f"{name}.json", "date": record["date"], "rows": rows}


if __name__ == "__main__":
    SHIPPED.write_text(json.dumps(selected(), indent=1) + "\n")
