"""`penstock bench page`: the page of benchmarks, from the records alone."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import JsonOption


def bench_page(
    results: Annotated[Path, typer.Option(help="where the records are")] = Path("benchmarks/results"),
    out: Annotated[Path, typer.Option(help="the page; its pictures go into a folder beside it")] = Path(
        "docs/benchmarks.md"
    ),
    json: JsonOption = False,
) -> None:
    """Write tables and pictures of all benchmark records, and update the pages that quote them."""
    from penstock.cli.output import print_json
    from penstock.report.benchmark_page import load_records, write_page
    from penstock.report.quoting import pages_with_quotes, update_pages

    records = load_records(results)
    pictures = write_page(records, results, out)
    updated = update_pages(pages_with_quotes(out.parent), records)
    if json:
        told = {"page": str(out), "records": list(records), "pictures": [str(path) for path in pictures]}
        print_json(told | {"updated": [str(path) for path in updated]})
    else:
        print(f"{out}: {len(records)} records, {len(pictures)} pictures; {len(updated)} pages that quote them updated")
