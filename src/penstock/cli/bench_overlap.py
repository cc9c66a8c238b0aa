"""`penstock bench overlap`: compression beside the backward pass of a GPU."""

from typing import Annotated

import typer

from penstock.cli.options import JsonOption, RecordOption


def bench_overlap(
    models: Annotated[
        str, typer.Option(help="names of the zoo with batches")
    ] = "vgg16_cifar:256,vgg16_cifar:2048,resnet50:256",
    workers: Annotated[str, typer.Option(help="numbers of workers; they share the GPU")] = "1,2",
    rounds: Annotated[int, typer.Option(help="of all methods in turn", min=1)] = 7,
    iterations: Annotated[int, typer.Option(help="of each method and round", min=1)] = 10,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Train on a GPU with and without a codec in turn; say what that costs, and what of it is hidden."""
    import torch

    from penstock.bench.claim import claim_documents
    from penstock.bench.overlap import claims, count_steps, overlap_rows
    from penstock.bench.overlap_worker import OverlapJob
    from penstock.bench.record import make_record, save_record
    from penstock.bench.train import parse_models
    from penstock.cli.options import parse_counts
    from penstock.cli.output import format_seconds, print_json, print_table
    from penstock.cli.progress import progress
    from penstock.errors import PenstockError

    found, sizes = parse_models(models), parse_counts(workers, "--workers")
    if not torch.cuda.is_available():
        raise PenstockError("bench overlap: torch sees no GPU here; it measures kernels on one")
    rows, device = [], ""
    with progress("methods", count_steps(sizes, len(found))) as done:
        for model, batch in found:
            for size in sizes:
                device, some = overlap_rows(OverlapJob(model, batch, rounds, iterations, 12), size, done)
                rows += some
                if out:  # what is measured is kept, whatever comes after
                    save_record(make_record("overlap", rows, device=device, claims=claim_documents(claims(rows))), out)
    if json:
        print_json(rows)
        return
    table = [
        (
            row["model"], row["batch"], row["workers"], row["method"], format_seconds(row["iteration_seconds"]),
            f"{row['slowdown']:+.1%}", f"{row['against_ddp']:+.1%}",
            format_seconds(row["codec_seconds"]) if "codec_seconds" in row else "-",
            f"{row['hidden']:.0%}" if row.get("hidden") is not None else "-",
        )
        for row in rows
    ]  # fmt: skip
    columns = ("model", "batch", "workers", "method", "iteration", "slowdown", "against ddp", "codec kernels", "hidden")
    print_table(f"compression beside the backward pass on {device}", columns, table, note="medians, measured")
