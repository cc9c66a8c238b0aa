"""Does `make demo` end with what is recommended ahead of stock DDP, within 90 s?

It runs `penstock demo` as `make demo` does after setting up, and keeps its table: seconds are the clock's, from the
start of the command to its end. Needs root, for emulated hosts; on a busy machine it says nothing.
"""

import json as json_module  # `json` is an option
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from penstock.bench.record import make_record, save_record
from penstock.cli.options import JsonOption, RecordOption
from penstock.cli.output import print_json, print_table
from penstock.errors import PenstockError
from study import Claim, claim_documents, print_claims, start

LEAST_SPEEDUP, MOST_SECONDS = 1.3, 90.0
Row = Mapping[str, Any]


def demo_rows(options: Sequence[str] = ()) -> tuple[list[dict[str, Any]], float]:
    """Run the demo; return a row for each method of its report, and the seconds that all of it took."""
    with tempfile.TemporaryDirectory() as folder:
        begun = perf_counter()
        command = [sys.executable, "-m", "penstock", "demo", "--out", folder, "--json", *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        seconds = perf_counter() - begun
        if done.returncode:
            raise PenstockError(f"penstock demo ended with {done.returncode}; wanted a table")
        found = json_module.loads((Path(folder) / "report.json").read_text())
        where = json_module.loads(done.stdout)["runs"][0]["where"]
    return [_row(method, where) for method in found["methods"]], seconds


def _row(method: Row, where: str) -> dict[str, Any]:
    return {
        "method": method["name"],
        "where": where,
        "metric": method["metric"],
        "iteration_seconds": method["iteration_seconds"],
        "bytes_sent": method["bytes_per_iteration"],
        "speedup": method["speedup"],
        "loses": "; ".join(method["loses"]),
    }


def claims(rows: Sequence[Row], seconds: float) -> list[Claim]:
    """Return what `make demo` must show."""
    ours = [row for row in rows if row["method"] != "stock DDP"]
    return [
        Claim(
            "the recommended settings, times as fast as stock DDP", max(row["speedup"] for row in ours), LEAST_SPEEDUP
        ),
        Claim("rows that lose against stock DDP", float(sum(bool(row["loses"]) for row in rows)), 0.0, at_most=True),
        Claim("seconds in all", seconds, MOST_SECONDS, at_most=True),
    ]


def demo(
    steps: Annotated[int, typer.Option(help="of each run; 0: as many as the demo has", min=0)] = 0,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Run the demo and keep its table. Needs root."""
    rows, seconds = demo_rows(["--steps", str(steps)] if steps else [])
    found = claim_documents(claims(rows, seconds))
    if out:
        save_record(make_record("demo", rows, claims=found), out)
    if json:
        print_json({"rows": rows, "claims": found})
        return
    print_table("the demo", tuple(rows[0]), [tuple(map(str, row.values())) for row in rows])
    print_claims(found)


if __name__ == "__main__":
    start(demo)
