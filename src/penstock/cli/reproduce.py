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

_RECORDS = {"hipress": ("casync",), "gtop-k": ("gtop-k",)}  # benchmarks that a paper's claims can use
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
    if record:
        _check_record(record, chosen)
    found = {name: claims_of(name, trace, column, record) for name in chosen}
    if pictures:
        _draw(pictures, trace, column)
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

    of = {kind: [claim for claim in claims if claim.kind is kind] for kind in Kind}
    title = f"{paper}: {{}} ({{}})"
    checked = [(c.what, c.published, c.ours, c.how, c.tolerance, c.verdict) for c in of[Kind.CHECKED]]
    columns: tuple[str, ...] = ("what", "printed", "ours", "how", "tolerance", "verdict")
    print_table(title.format(Kind.CHECKED.value, len(checked)), columns, checked)
    measured = [(c.what, c.published, c.ours, c.how, c.verdict) for c in of[Kind.MEASURED]]
    if measured:
        columns = ("what", "formula", "measured", "record", "difference")
        print_table(title.format(Kind.MEASURED.value, len(measured)), columns, measured)
    own = [(c.what, c.published, c.ours, c.tolerance, c.verdict) for c in of[Kind.OWN]]
    if own:
        columns = ("what", "printed", "from its other numbers", "tolerance", "verdict")
        print_table(title.format(Kind.OWN.value, len(own)), columns, own)
    missing = [(c.what, c.published, c.verdict.removeprefix("not checked: ")) for c in of[Kind.NOT_HERE]]
    if missing:
        print_table(title.format(Kind.NOT_HERE.value, len(missing)), ("what", "printed", "why"), missing)
    print(f"{paper}: {counts(claims)}\n")


def claims_of(paper: str, trace: str = "", column: str = "tmpcomm", record: str = "") -> "list[Claim]":
    """Return the claims of one paper; `trace` is MG-WFBP's authors' own, `record` a measurement for one of them."""
    if paper == "mg-wfbp":
        return _mg_wfbp(trace, column)
    module = import_module(f"penstock.reproduce.{paper.replace('-', '_')}")
    found: list[Claim] = module.claims(_record_for(paper, record)) if paper in _RECORDS else module.claims()
    return found


def _mg_wfbp(trace: str, column: str) -> "list[Claim]":
    from penstock.reproduce.mg_wfbp import claims

    return claims(_authors_trace(trace, column) if trace else None)


def _record_for(paper: str, path: str) -> "Mapping[str, Any] | None":
    """Return the record at `path` if it is one of the paper's benchmark."""
    from pathlib import Path

    from penstock.bench.record import load_record

    record = load_record(Path(path)) if path else None
    return record if record is not None and record["benchmark"].startswith(_RECORDS[paper]) else None


def _check_record(path: str, papers: "Sequence[str]") -> None:
    """Refuse a record that none of the papers can use, instead of leaving it out without a word."""
    from pathlib import Path

    from penstock.bench.record import load_record

    wanted = [benchmark for paper in papers for benchmark in _RECORDS.get(paper, ())]
    benchmark = load_record(Path(path))["benchmark"]
    if not benchmark.startswith(tuple(wanted)):
        kinds = " or ".join(wanted) or "none: this paper takes no record; leave --record out"
        raise PenstockError(f"{path}: benchmark: found {benchmark!r}; wanted {kinds}")


def _authors_trace(trace: str, column: str) -> "Trace":
    from penstock.trace import load_trace, trace_from_csv

    return trace_from_csv(trace, time_column=column) if trace.endswith(".csv") else load_trace(trace)


def _draw(folder: str, trace: str, column: str) -> None:
    from pathlib import Path

    from penstock.report.pictures import draw_figures
    from penstock.traces import load_shipped

    draw_figures(Path(folder), _authors_trace(trace, column) if trace else load_shipped("googlenet"))
