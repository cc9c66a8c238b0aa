"""What sparse all-reduces should show, as questions to the rows of `penstock bench sparse`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.bench.claim import Claim

Row = Mapping[str, Any]
_BANDWIDTH = 4  # a message whose bytes take so many times its startup is bound by bandwidth


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return every claim the rows can answer."""
    table = {(row["hosts"], row["engine"], row["density"], row["merges"], row["strategy"]): row for row in rows}
    return [*_speed(table), *_crossing(table), *_model(rows)]


Table = Mapping[tuple[Any, ...], Row]


def _speed(table: Table) -> Iterator[Claim]:
    """Look at density 0.005: gtopk 1.5x top-k and 15x dense, doubling 1.3x the tree; asked for on 16 hosts."""
    for (hosts, engine, density, merges, strategy), row in table.items():
        if strategy != "gtopk" or density != 0.005:
            continue
        where = f"on {hosts} hosts, {engine}, density {density}, merges {merges}"
        rivals = (
            ("gtopk over top-k", "topk_allgather", merges, density, 1.5),
            ("gtopk over the dense ring", "ring", None, None, 15.0),
        )
        for text, name, how, share, wanted in rivals if hosts == 16 else ():
            other = table.get((hosts, engine, share, how, name))
            if other is not None:
                yield Claim(f"{text}, {where}", other["seconds"] / row["seconds"], wanted)
        doubling = table.get((hosts, engine, density, merges, "gtopk_doubling"))
        if doubling is not None and hosts == 16:
            yield Claim(f"doubling over tree and broadcast, {where}", row["seconds"] / doubling["seconds"], 1.3)


def _crossing(table: Table) -> Iterator[Claim]:
    """Whoever is predicted to be faster, gtopk or top-k, should be; ties within 10% may go either way."""
    for (hosts, engine, density, merges, strategy), row in table.items():
        other = table.get((hosts, engine, density, merges, "topk_allgather"))
        if strategy != "gtopk" or other is None:
            continue
        predicted = other["predicted_seconds"] / row["predicted_seconds"]
        found = other["seconds"] / row["seconds"]
        if abs(predicted - 1) > 0.1:
            faster = "gtopk" if predicted > 1 else "top-k"
            ratio = found if predicted > 1 else 1 / found
            text = f"{faster} is faster as predicted, {hosts} hosts, {engine}, density {density}, merges {merges}"
            yield Claim(text, ratio, 1.0)


def _model(rows: Sequence[Row]) -> Iterator[Claim]:
    """Compare times with the model, within 20%, where the bytes of a message take longer than its startup."""
    for row in rows:
        block = row["block_nbytes"]
        if block is None or row["beta_seconds_per_byte"] * block < _BANDWIDTH * row["alpha_seconds"]:
            continue
        off = max(row["predicted_seconds"] / row["seconds"], row["seconds"] / row["predicted_seconds"]) - 1
        where = f"{row['strategy']}, {row['hosts']} hosts, {row['engine']}, density {row['density']}"
        yield Claim(f"model off, {where}, merges {row['merges']}", off, 0.2, at_most=True)
