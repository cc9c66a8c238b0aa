"""`penstock reproduce`: the papers' tables, theirs beside ours."""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import JsonOption, completing
from penstock.errors import PenstockError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.reproduce.claim import Claim
    from penstock.trace import Trace

_RECORDS = {"hipress": "casync", "gtop-k": "gtop-k"}  # the benchmark that a paper's claims can use
PAPERS = ("mg-wfbp", "gtop-k", "linear-pipeline", "hipress")


def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            help="mg-wfbp, gtop-k, linear-pipeline, hipress or all", autocompletion=completing(lambda: (*PAPERS, "all"))
        ),
    ] = "all",
    trace: Annotated[str, typer.Option(metavar="FILE", help="the authors' GoogLeNet/K80 layers, for mg-wfbp")] = "",
    column: Annotated[str, typer.Option(help="which of the file's time columns to read")] = "tmpcomm",
    pictures: Annotated[str, typer.Option(metavar="FOLDER", help="redraw MG-WFBP's Fig. 1, 2, 10 and 11 there")] = "",
    record: Annotated[
        str, typer.Option(metavar="FILE", help="of benchmarks/casync.py or gtop_k.py, instead of ours")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Print the papers' numbers beside ours, by kind.

    Checked against what the paper prints; the paper's formula on our machine beside a measurement; not checkable here;
    and numbers of a paper against one another, where nothing of ours is compared.
    """
    from penstock.cli.output import print_json

    if paper not in (*PAPERS, "all"):
        near = did_you_mean(paper, PAPERS)
        raise PenstockError(f"no paper called {paper!r}; wanted one of {', '.join(PAPERS)} or all{near}")
    chosen = PAPERS if paper == "all" else (paper,)
    if trace and "mg-wfbp" not in chosen:
        raise PenstockError(f"--trace {trace} with {paper}: only mg-wfbp's claims need one; leave it out")
    layers = _authors_trace(trace, column) if trace else None
    measured = _given_record(record, chosen) if record else None
    found = {name: claims_of(name, layers, measured) for name in chosen}
    if pictures:
        _draw(pictures, layers)
    if json:
        print_json({name: [claim.document() for claim in claims] for name, claims in found.items()})
        return
    from penstock.reproduce.claim import counts

    for name, claims in found.items():
        _print(name, claims)
    print(counts([claim for claims in found.values() for claim in claims]))
    if "mg-wfbp" in found and not trace:
        print("MG-WFBP's Fig. 6, 10 and 11 need the authors' trace: --trace googlenet_k80_layers.csv")


def _print(paper: str, claims: "Sequence[Claim]") -> None:
    """Print a table for each kind of claim, so that they cannot be taken for one another."""
    from penstock.cli.output import print_table
    from penstock.reproduce.claim import Kind, counts

    measured = {"what": "what", "formula": "published", "measured": "ours", "record": "how", "difference": "verdict"}
    own = {"from its other numbers": "ours", "tolerance": "tolerance", "verdict": "verdict"}
    printed = {"what": "what", "printed": "published"}
    columns = {
        Kind.CHECKED: printed | {name: name for name in ("ours", "how", "tolerance", "verdict")},
        Kind.MEASURED: measured,
        Kind.OWN: printed | own,
        Kind.NOT_HERE: printed | {"why": "verdict"},
    }
    for kind, fields in columns.items():
        rows = [
            tuple(getattr(claim, field).removeprefix("not checked: ") for field in fields.values())
            for claim in claims
            if claim.kind is kind
        ]
        if rows:
            print_table(f"{paper}: {kind.value} ({len(rows)})", tuple(fields), rows)
    print(f"{paper}: {counts(claims)}\n")


def claims_of(paper: str, trace: "Trace | None" = None, record: "Mapping[str, Any] | None" = None) -> "list[Claim]":
    """Return the claims of one paper; `trace` is MG-WFBP's authors' own, `record` a measurement for another paper."""
    claims = import_module(f"penstock.reproduce.{paper.replace('-', '_')}").claims
    found: list[Claim] = claims(trace) if paper == "mg-wfbp" else claims(record) if paper in _RECORDS else claims()
    return found


def _given_record(path: str, papers: "Sequence[str]") -> "Mapping[str, Any]":
    """Read a record; refuse one that none of the papers can use, instead of leaving it out without a word."""
    from pathlib import Path

    from penstock.bench.record import load_record

    record = load_record(Path(path))
    wanted = [_RECORDS[paper] for paper in papers if paper in _RECORDS]
    if not record["benchmark"].startswith(tuple(wanted)):
        kinds = " or ".join(wanted) or "none: this paper takes no record; leave --record out"
        raise PenstockError(f"{path}: benchmark: found {record['benchmark']!r}; wanted {kinds}")
    return record


def _authors_trace(trace: str, column: str) -> "Trace":
    from penstock.trace import load_trace, trace_from_csv

    return trace_from_csv(trace, time_column=column) if trace.endswith(".csv") else load_trace(trace)


def _draw(folder: str, layers: "Trace | None") -> None:
    from pathlib import Path

    from penstock.report.pictures import draw_figures
    from penstock.traces import load_shipped

    draw_figures(Path(folder), layers or load_shipped("googlenet"))
