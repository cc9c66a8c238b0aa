"""What profiling costs: iterations with the profiler's hooks beside iterations without, in turn."""

from typing import Annotated

import typer
from rich.progress import track

from measure_traces import CPU_MODELS, overhead_rows
from penstock.bench.record import make_record, save_record
from penstock.cli.options import JsonOption, RecordOption
from penstock.cli.output import format_seconds, print_json, print_table, stderr_console
from study import start


def profile_overhead(
    models: Annotated[str, typer.Option(help="names of the zoo, with commas between")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Time iterations with and without the profiler's hooks, in turn."""
    names = [name.strip() for name in models.split(",")] if models else list(CPU_MODELS)
    console = stderr_console()
    progress = track(
        overhead_rows(names, device), "models", len(names), console=console, disable=not console.is_terminal
    )
    rows = list(progress)
    if out:
        save_record(make_record("profile", rows), out)
    if json:
        print_json(rows)
        return
    table = [
        (
            row["model"],
            row["batch"],
            row["tensors"],
            format_seconds(row["iteration_seconds"]),
            format_seconds(row["profiled_iteration_seconds"]),
            f"{row['overhead']:+.2%} (spread {row['overhead_spread']:.2%})",
            format_seconds(row["trace_seconds"]),
        )
        for row in rows
    ]
    columns = ("model", "batch", "tensors", "iteration", "profiled", "overhead", "trace's total")
    print_table(f"profiling on {rows[0]['device']}", columns, table, note="medians of interleaved blocks, measured")


if __name__ == "__main__":
    start(profile_overhead)
