"""`penstock report`: one page that shows what training runs did."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import JsonOption


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="every run.json below it is read")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="the page; default: DIR/report.html")] = None,
    baseline: Annotated[str, typer.Option(help="the run that others are compared with; default: stock DDP")] = "",
    steps: Annotated[int, typer.Option(help="last steps of each run in the Perfetto file", min=0)] = 100,
    json: JsonOption = False,
) -> None:
    """Write one self-contained HTML page about training runs, its data as JSON, and a Perfetto file."""
    from penstock.cli.output import format_seconds, print_json, print_table
    from penstock.report.write_report import write_report
    from penstock.train.view import number

    written = write_report(folder, out, baseline or None, steps)
    if json:
        print_json(written.document)
        return
    print_table(
        f"{written.document['title']}, compared with {written.document['methods'][0]['baseline']}",
        ("method", "metric", "iteration", "speed-up", "of the dense bytes", "loses where"),
        [
            (
                row["name"],
                number(row["metric"]),
                "-" if row["iteration_seconds"] is None else format_seconds(row["iteration_seconds"]),
                number(row["speedup"]),
                "-" if row["ratio"] is None else f"{100 * row['ratio']:.3g}%",
                "; ".join(row["loses"]),
            )
            for row in written.document["methods"]
        ],
        note=f"metric: {written.document['metric_title']}",
    )
    print(f"{written.page}; data: {written.data}; Perfetto: {written.perfetto}")
