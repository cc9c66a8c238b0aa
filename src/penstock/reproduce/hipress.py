"""HiPress (Bai et al.): Tables 3, 5 and 7, the volume that one bit saves, and the steps of Fig. 11."""

from collections.abc import Mapping
from importlib import resources
from typing import Any

from penstock.compll.frontend.parser import parse
from penstock.cost.papers import CASYNC, SyncCounts
from penstock.reproduce.claim import Claim, compare_exactly, compare_numbers
from penstock.reproduce.hipress_fig_11 import figure_11
from penstock.reproduce.hipress_table_7 import table_7

TABLE_5 = {"onebit": (21, 9), "tbq": (13, 18), "terngrad": (23, 7), "dgc": (29, 15), "graddrop": (29, 21)}


def claims(record: Mapping[str, Any] | None = None) -> list[Claim]:
    """Return every claim; `record` is one of `benchmarks/casync.py`, which measures Fig. 11."""
    saving = 1 - 1 / 32  # one bit for a float32
    volume = compare_numbers("section 2.4: volume that onebit saves (%)", 96.9, 100 * saving, "computed", 0.001)
    return [volume, *_table_3(), *(_table_5(name) for name in TABLE_5), *table_7(), *figure_11(record)]


def _table_3() -> list[Claim]:
    n, k = 16, 4
    published = {"casync_ring": SyncCounts(2 * (n - 1), n, n), "casync_ps": SyncCounts(2 * n, k + 1, n + 1)}
    return [
        compare_exactly(
            f"Table 3, {name}, N=16, K=4: sends, encodes, decodes",
            (count.sends, count.encodes, count.decodes),
            (ours.sends, ours.encodes, ours.decodes),
            "computed",
        )
        for name, count in published.items()
        for ours in [CASYNC[name](n, k)]
    ]


def _table_5(name: str) -> Claim:
    """Count our lines as the paper counts its own: those of encode and decode, and those of the functions they use."""
    published, ours = TABLE_5[name], lines_of(name)
    short = ours[0] <= published[0] and ours[1] <= published[1]
    verdict = "matches: no more lines" if short else "differs: more lines"
    return Claim(f"Table 5, {name}: lines of logic, of functions", str(published), str(ours), "counted", verdict)


def lines_of(name: str) -> tuple[int, int]:
    """Return how many lines of a shipped compressor are encode and decode, and other functions; comments left out."""
    text = (resources.files("penstock.compll") / "algorithms" / f"{name}.cll").read_text()
    lines, logic, other = text.splitlines(), 0, 0
    for function in parse(text).functions:
        body = lines[function.at.line - 1 : function.end.line]
        count = sum(bool(line.split("//")[0].strip()) for line in body)
        logic, other = (logic + count, other) if function.name in ("encode", "decode") else (logic, other + count)
    return logic, other
