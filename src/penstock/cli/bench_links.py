"""`penstock bench links`: how closely emulated links hold their rate."""

from typing import Any

from penstock.cli.options import JsonOption, RecordOption


def bench_links(
    out: RecordOption = "",
    json: JsonOption = False,
) -> None:
    """Measure what emulated links deliver, 100 Mb/s to 2 Gb/s on 4 hosts; needs root, about a minute."""
    from rich.progress import track

    from penstock.bench.link_rates import MESSAGE_NBYTES, MESSAGE_RATES, RATES, link_rows, message_rows
    from penstock.bench.record import make_record, save_record
    from penstock.cli.output import print_json, stderr_console

    rows = list(track(link_rows(), "links", 2 * len(RATES), console=stderr_console(), transient=True))
    count = len(MESSAGE_RATES) * len(MESSAGE_NBYTES)
    messages = list(track(message_rows(), "messages", count, console=stderr_console(), transient=True))
    if json:
        print_json({"rows": rows, "messages": messages})
    else:
        _print(rows, messages)
    if out:
        save_record(make_record("links", rows, messages=messages), out)


def _print(rows: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    from penstock.cli.output import format_seconds, print_table

    print_table(
        "what emulated links deliver: TCP payload, all pairs of 4 hosts",
        ("rate", "pairs", "median Mb/s", "deviation, least", "largest", "latency"),
        [
            (
                row["rate"],
                row["pairs"],
                f"{row['median_bits_per_second'] / 1e6:.1f}",
                f"{row['least_deviation']:+.2%}",
                f"{row['largest_deviation']:+.2%}",
                format_seconds(row["latency_seconds"]),
            )
            for row in rows
        ],
    )
    print_table(
        "one message after a pause of 20 ms",
        ("rate", "bytes", "size / rate", "measured"),
        [
            (row["rate"], row["nbytes"], format_seconds(row["asked_seconds"]), format_seconds(row["seconds"]))
            for row in messages
        ],
    )
