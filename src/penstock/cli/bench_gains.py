"""`penstock bench gains`: predicted gains over DDP's buckets and over greedy merging, replayed."""

from typing import Annotated, Any

import typer

from penstock.cli.options import JsonOption, RecordOption


def bench_gains(
    settings: Annotated[
        str, typer.Option(help="TRACE:HOSTS:RATE:LATENCY, with commas between; default: seven of ours")
    ] = "",
    traces: Annotated[str, typer.Option(metavar="FOLDER", help="of the traces that end in -cpu")] = "benchmarks/traces",
    iterations: Annotated[int, typer.Option(help="of each plan, after one to warm up", min=1)] = 3,
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Replay settings in which the exact plan is predicted to gain, and see whether it does. Needs root."""
    from penstock.bench.claim import claim_documents
    from penstock.bench.gains import DEFAULT, PLANNERS, claims, gain_rows, parse_settings
    from penstock.bench.record import make_record, save_record
    from penstock.cli.claims import print_claims
    from penstock.cli.output import print_json
    from penstock.cli.progress import progress
    from penstock.traces import find_trace

    chosen = parse_settings(settings or DEFAULT, traces)
    for setting in chosen:
        find_trace(setting.trace)
    with progress("gains", len(chosen) * len(PLANNERS) * (iterations + 1)) as done:
        rows = list(gain_rows(chosen, iterations, done))
    answers = claim_documents(claims(rows))
    if out:
        save_record(make_record("gains", rows, claims=answers), out)
    if json:
        print_json({"rows": rows, "claims": answers})
        return
    _print(rows)
    print_claims(answers)


def _print(rows: list[dict[str, Any]]) -> None:
    from penstock.cli.output import format_seconds, print_table

    print_table(
        "replayed on emulated hosts: what the exact plan gains",
        (
            "trace",
            "hosts",
            "rate",
            "latency",
            "plan",
            "messages",
            "measured",
            "simulated",
            "error",
            "gain",
            "predicted",
        ),
        [
            (
                *(row[name] for name in ("what", "hosts", "rate")),
                format_seconds(row["latency_seconds"]),
                *(row[name] for name in ("how", "messages")),
                *(format_seconds(row[name]) for name in ("measured_seconds", "simulated_seconds")),
                f"{100 * row['error']:+.1f}%",
                *(f"{row[name]:.3f}x" if name in row else "" for name in ("measured_gain", "predicted_gain")),
            )
            for row in rows
        ],
    )
