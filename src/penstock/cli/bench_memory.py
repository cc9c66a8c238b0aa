"""`penstock bench memory`: the most memory that a rank needs, beside torch's own wrapper."""

from typing import Annotated

import typer

from penstock.cli.options import JsonOption, RecordOption


def bench_memory(
    models: Annotated[str, typer.Option(help="of the zoo, each with its batch per rank")] = "vgg16_cifar:8,resnet50:2",
    methods: Annotated[str, typer.Option(help="ways of training; default: stock with views, ours")] = "",
    repetitions: Annotated[int, typer.Option(help="runs of each, in fresh processes", min=1)] = 3,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Train by every method in fresh processes on two emulated hosts and compare their peaks. Needs root."""
    from penstock.bench.claim import claim_documents
    from penstock.bench.memory import METHODS, claims, memory_rows
    from penstock.bench.record import make_record, save_record
    from penstock.bench.train import parse_models
    from penstock.bench.train_methods import find_method
    from penstock.cli.claims import print_claims
    from penstock.cli.output import print_json, print_table
    from penstock.cli.progress import progress

    tasks = [(name, batch or 1) for name, batch in parse_models(models)]
    names = [part.strip() for part in methods.split(",")] if methods else list(METHODS)
    for name in names:
        find_method(name)
    with progress("memory", len(tasks) * len(names) * repetitions) as done:
        rows = list(memory_rows(tasks, names, repetitions, done))
    answers = claim_documents(claims(rows))
    if out:
        save_record(make_record("memory", rows, claims=answers), out)
    if json:
        print_json({"rows": rows, "claims": answers})
        return
    print_table(
        "most memory that a rank held, imports excepted, MB",
        ("model", "batch", "method", "peak", "spread", "imports", "over ddp-views"),
        [
            (
                *(row[name] for name in ("model", "batch", "method")),
                *(f"{row[name] / 1e6:.1f}" for name in ("peak_nbytes", "spread_nbytes", "imports_nbytes")),
                f"{row['ratio_to_views']:.4f}" if row["ratio_to_views"] else "",
            )
            for row in rows
        ],
    )
    print_claims(answers)
