"""What the page about emulated hosts quotes of `penstock bench links`."""

from collections.abc import Mapping
from typing import Any

from penstock.report.benchmark_tables import markdown_rows

Record = Mapping[str, Any]


def links_table(record: Record) -> str:
    """Return what links of each rate deliver, pairs of hosts alone and together."""
    rows = [
        (
            row["rate"],
            row["pairs"],
            f"{row['median_bits_per_second'] / 1e6:.1f} Mb/s",
            f"{row['least_deviation']:+.2%} to {row['largest_deviation']:+.2%}",
        )
        for row in record["rows"]
    ]
    return markdown_rows(("rate", "pairs", "median payload", "deviation"), rows)


def messages_table(record: Record) -> str:
    """Return how long one message takes after a pause, beside its size over the rate."""
    rows = [
        (row["rate"], str(row["nbytes"]), _shown(row["asked_seconds"]), _shown(row["seconds"]))
        for row in record["messages"]
    ]
    return markdown_rows(("rate", "bytes", "size / rate", "one message after a pause"), rows)


def _shown(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
