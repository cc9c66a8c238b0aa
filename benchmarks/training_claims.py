"""What is asked of `penstock bench train` on four hosts at 1 Gb/s: its records are every user's, and do not say so."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from study import Claim

STILL = "no-communication"
OVER_NOTHING = {"penstock-onebit": 1.12, "penstock-gtopk": 1.15, "penstock-terngrad": 1.18}  # times as long, at most
TIMES_AS_FAST = {  # of two methods the first over the second, at least
    ("penstock-wfbp-bulk", "penstock-wfbp"): 1.3,
    ("penstock-onebit-wfbp-bulk", "penstock-onebit-wfbp"): 1.3,
    ("penstock-exact-native", "ddp"): 1.0,
    ("penstock-bsp-split", "ddp"): 1.0,
}


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the claims about the methods of a record that has no others: those of each model by themselves."""
    models = dict.fromkeys(row["model"] for row in rows if "iteration_seconds" in row)
    return [claim for model in models for claim in _of_model(model, [row for row in rows if row.get("model") == model])]


def _of_model(model: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Claim]:
    seconds = {row["method"]: row["iteration_seconds"] for row in rows if "iteration_seconds" in row}
    if set(seconds) == {STILL, *OVER_NOTHING}:
        for method, wanted in OVER_NOTHING.items():
            text = f"{model}, {method.removeprefix('penstock-')}: iteration over that without communication"
            yield Claim(text, seconds[method] / seconds[STILL], wanted, at_most=True)
    for (ours, other), wanted in TIMES_AS_FAST.items():
        if ours in seconds and other in seconds:
            yield Claim(f"{model}, {ours} over {other}, times as fast", seconds[other] / seconds[ours], wanted)
