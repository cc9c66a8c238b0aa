"""`penstock bench collectives`: our collectives beside gloo's and Open MPI's own."""

from typing import Annotated

import typer

from penstock.cli.options import JsonOption, RecordOption, parse_counts


def bench_collectives(
    hosts: Annotated[str, typer.Option(help="numbers of hosts")] = "4,8",
    rate: Annotated[str, typer.Option(help="of each NIC: 1gbit, none; or loopback: no emulated hosts")] = "1gbit",
    links: Annotated[
        str, typer.Option(help="smooth; or coarse: plain token buckets, which let short messages pass at once")
    ] = "smooth",
    engine: Annotated[str, typer.Option(help="gloo, mpi, or both")] = "gloo,mpi",
    sizes: Annotated[str, typer.Option(help="bytes")] = "65536,1000000,16000000,64000000",
    rounds: Annotated[
        int, typer.Option(help="per size; a round of a small size times every case many times", min=1)
    ] = 5,
    measure: Annotated[bool, typer.Option(help="measure alpha, beta and gamma, and predict with them")] = True,
    patience: Annotated[float, typer.Option(help="seconds to wait for a quiet machine, per setting", min=0.0)] = 60.0,
    note: Annotated[str, typer.Option(help="what a reader should know about this run; shown with the record")] = "",
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Time all-reduce, broadcast and reduce on emulated hosts, peers interleaved in the same run. Needs root."""
    from penstock.bench.collective_times import CASES, CollectivesJob, collective_rows
    from penstock.bench.jobs import Place
    from penstock.bench.record import make_record, save_record
    from penstock.cli.output import print_json

    sizes_nbytes = tuple(parse_counts(sizes, "--sizes"))
    rows = []
    for count in parse_counts(hosts, "--hosts"):
        for name in parse_engines(engine):
            job = CollectivesJob(name, sizes_nbytes, CASES, rounds, measure, patience)
            rows += list(collective_rows(Place(count, rate, links), job))
    if json:
        print_json(rows)
    else:
        _print(rows)
    if out:
        save_record(make_record("collectives", rows, note=note), out)


def parse_engines(text: str) -> list[str]:
    """Return the engines of a comma-separated list."""
    from penstock.bench.collective_times import IMPLEMENTATION
    from penstock.errors import PenstockError

    engines = [part.strip() for part in text.split(",")]
    if not set(engines) <= set(IMPLEMENTATION):
        raise PenstockError(f"--engine: found {text!r}; wanted {' or '.join(IMPLEMENTATION)}, with a comma between")
    return engines


def _print(rows: list[dict[str, object]]) -> None:
    from penstock.cli.output import print_table

    columns = ("hosts", "rate", "engine", "nbytes", "operation", "implementation", "strategy")
    times = ("seconds", "spread", "floor_seconds", "predicted_seconds")
    disturbed = max(float(str(row["others"])) for row in rows)
    order = sorted(rows, key=lambda row: [row[name] for name in columns[:5]])
    table = [[row[name] for name in columns] + [_milliseconds(row[name]) for name in times] for row in order]
    note = f"others used up to {disturbed:.0%} of this machine meanwhile"
    print_table("collectives, milliseconds", (*columns, "median", "spread", "floor", "predicted"), table, note)


def _milliseconds(seconds: object) -> object:
    return round(seconds * 1e3, 3) if isinstance(seconds, float) else ""
