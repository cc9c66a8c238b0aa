"""`penstock bench gtop-k`: gTop-k's Table VII replayed on emulated hosts."""

from typing import Annotated

import typer

from penstock.cli.options import JsonOption, RecordOption


def bench_gtop_k(
    hosts: Annotated[int, typer.Option(help="emulated hosts", min=1)] = 16,
    rate: Annotated[str, typer.Option(help="of each NIC, such as 1gbit")] = "1gbit",
    links: Annotated[str, typer.Option(help="smooth; or coarse, which take less processor time")] = "coarse",
    engine: Annotated[str, typer.Option(help="gloo or mpi")] = "gloo",
    models: Annotated[str, typer.Option(help="rows of the table")] = "VGG-16,ResNet-20,AlexNet,ResNet-50",
    iterations: Annotated[int, typer.Option(help="of every method, after one to warm up", min=1)] = 2,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Replay iterations of Table VII: real communication, computing and compressing by waiting. Needs root."""
    from penstock.bench.gtop_k import cases, replayed_rows
    from penstock.bench.jobs import Place
    from penstock.bench.record import make_record, save_record
    from penstock.cli.output import print_json, print_table

    chosen = cases([part.strip() for part in models.split(",")])
    rows = list(replayed_rows(Place(hosts, rate), chosen, engine, links, iterations))
    if out:
        save_record(make_record("gtop-k", rows), out)
    if json:
        print_json(rows)
        return
    table = [(row["model"], row["method"], round(row["seconds"], 4), round(row["spread"], 4)) for row in rows]
    print_table(f"Table VII on {hosts} hosts, seconds", ("model", "method", "iteration", "spread"), table)
