"""The page on emulated hosts shows what was measured, not what was typed."""

import json
import re
from pathlib import Path

from penstock.cli.output import format_seconds

ROOT = Path(__file__).parents[2]


def test_the_tables_of_links_are_the_result_file():
    page = (ROOT / "docs" / "cluster.md").read_text()
    record = json.loads((ROOT / "benchmarks" / "results" / "links.json").read_text())
    for row in record["messages"]:
        asked, measured = format_seconds(row["asked_seconds"]), format_seconds(row["seconds"])
        assert f"| {row['rate']} | {row['nbytes']} | {asked} | {measured} |\n" in page
    for row in record["rows"]:
        rate = f"{row['median_bits_per_second'] / 1e6:.1f} Mb/s"
        deviation = f"{row['least_deviation']:+.2%} to {row['largest_deviation']:+.2%}"
        assert f"| {row['rate']} | {row['pairs']} | {rate} | {deviation} |\n" in page


def test_every_option_the_page_names_exists():
    source = (ROOT / "src" / "penstock" / "cli" / "cluster.py").read_text()
    page = (ROOT / "docs" / "cluster.md").read_text()
    named = {option.replace("-", "_") for option in re.findall(r"`--([a-z0-9-]+)[ `]", page)} - {"privileged"}
    assert named >= {
        "rate",
        "uplink",
        "engine",
        "ranks_per_host",
        "gpus",
        "latency",
        "env",
        "grace",
        "timeout",
        "rank0",
    }
    for option in named:
        assert f"    {option}: " in source
