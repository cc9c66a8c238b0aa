"""`penstock bench memory`: the most memory that a rank needs, beside torch's own wrapper."""

from typing import Annotated

import typer

from penstock.cli.options import JsonOption, RecordOption

RATIOS = ("ratio_to_views", "ratio_range", "ratio_less_imports")


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
    from penstock.bench.memory_worker import find_wrapper
    from penstock.bench.record import make_record, save_record
    from penstock.bench.train import parse_models
    from penstock.cli.claims import print_claims
    from penstock.cli.output import print_json, print_table
    from penstock.cli.progress import progress

    tasks = [(name, batch or 1) for name, batch in parse_models(models)]
    names = [part.strip() for part in methods.split(",")] if methods else list(METHODS)
    for name in names:
        find_wrapper(name)
    with progress("memory", len(tasks) * len(names) * repetitions) as done:
        rows = list(memory_rows(tasks, names, repetitions, done))
    answers = claim_documents(claims(rows))
    if out:
        save_record(make_record("memory", rows, claims=answers), out)
    if json:
        print_json({"rows": rows, "claims": answers})
        return
    print_table(
        "most memory that a rank's process held, MB",
        ("model", "batch", "method", "peak", "spread", "imports", "over ddp-views", "spread", "less imports"),
        [
            (
                *(row[name] for name in ("model", "batch", "method")),
                *(f"{row[name] / 1e6:.1f}" for name in ("peak_nbytes", "spread_nbytes", "imports_nbytes")),
                *(f"{row[name]:.4f}" if row[name] else "" for name in RATIOS),
            )
            for row in rows
        ],
    )
    print_claims(answers)
