"""`penstock bench sparse`: global top-k, top-k and the dense ring on emulated hosts, beside the model."""

from typing import Annotated, Any

import typer

from penstock.cli.options import JsonOption, RecordOption, parse_counts


def bench_sparse(
    hosts: Annotated[str, typer.Option(help="numbers of hosts")] = "4,8,16",
    rate: Annotated[str, typer.Option(help="of each NIC, such as 1gbit")] = "1gbit",
    links: Annotated[str, typer.Option(help="smooth; or coarse, which take less processor time")] = "smooth",
    engine: Annotated[str, typer.Option(help="gloo, mpi, or both")] = "gloo",
    numel: Annotated[int, typer.Option(help="elements of the gradient", min=1000)] = 25_000_000,
    densities: Annotated[str, typer.Option(help="shares of the gradient that are sent")] = "0.001,0.005",
    merges: Annotated[str, typer.Option(help="computed, waited for, or both")] = "waited,computed",
    index_form: Annotated[str, typer.Option(help="int32 (8 bytes per entry), gaps or smaller")] = "int32",
    rounds: Annotated[int, typer.Option(help="of every strategy", min=1)] = 7,
    dense_rounds: Annotated[int, typer.Option(help="of the dense ring; 0: leave it out", min=0)] = 2,
    patience: Annotated[float, typer.Option(help="seconds to wait for a quiet machine, per setting", min=0.0)] = 30.0,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Time sparse all-reduces and the dense ring on emulated hosts. Needs root."""
    from penstock.bench.claim import claim_documents
    from penstock.bench.jobs import Place
    from penstock.bench.record import make_record, save_record
    from penstock.bench.sparse import STRATEGIES, local_seconds, sparse_rows
    from penstock.bench.sparse_claims import claims
    from penstock.bench.sparse_worker import Job
    from penstock.cli.bench_collectives import parse_engines
    from penstock.cli.output import print_json

    shares = _parse_densities(densities)
    local = local_seconds(numel, shares, index_form)
    merge_seconds = tuple(one["merge_seconds"] for one in local)
    rows: list[dict[str, Any]] = []
    for count in parse_counts(hosts, "--hosts"):
        for name in parse_engines(engine):
            for turn, how in enumerate(part.strip() for part in merges.split(",")):
                ring = 0 if turn else dense_rounds  # once is enough: it has no merges of blocks
                job = Job(name, numel, shares, STRATEGIES, merge_seconds, how, index_form, rounds, ring, patience)
                rows += list(sparse_rows(Place(count, rate), job, links))
    answers = claim_documents(claims(rows))
    if out:
        save_record(make_record("sparse", rows, claims=answers, local=local), out)
    if json:
        print_json({"rows": rows, "claims": answers, "local": local})
    else:
        _print(rows, answers, local)


def _parse_densities(text: str) -> tuple[float, ...]:
    from penstock.errors import PenstockError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise PenstockError(
            f"--densities: found {text!r}; wanted numbers with commas between, as 0.001,0.005"
        ) from None


_TIMES = ("seconds", "spread", "floor_seconds", "messages_seconds", "merges_seconds", "predicted_seconds")


def _milliseconds(seconds: float | None) -> object:
    return "" if seconds is None else round(1e3 * seconds, 2)


def _print(rows: list[dict[str, Any]], answers: list[dict[str, Any]], local: list[dict[str, float]]) -> None:
    from penstock.cli.claims import print_claims
    from penstock.cli.output import print_table

    columns = ("hosts", "engine", "density", "strategy", "merges")
    table = [
        [row[name] if row[name] is not None else "" for name in columns]
        + [_milliseconds(row[name]) for name in _TIMES]
        + [f"{row['error']:+.0%}", _milliseconds(row["alpha_beta_seconds"])]
        for row in rows
    ]
    times = ("median", "spread", "floor", "messages", "merges", "predicted", "error", "sharing nothing")
    print_table("sparse all-reduce, milliseconds", (*columns, *times), table)
    print_table(
        "one rank by itself, milliseconds",
        tuple(local[0]),
        [[one["density"], *(round(1e3 * value, 2) for value in list(one.values())[1:])] for one in local],
    )
    print_claims(answers)
