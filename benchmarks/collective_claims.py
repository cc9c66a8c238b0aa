"""What our collectives should show, as questions to the rows of `penstock bench collectives`.

Each claim is a ratio, the value it should have, and whether it has it. Rows that a claim needs and that were not
measured leave it out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from study import Claim

MEGABYTES_16, KILOBYTES_64 = 16_000_000, 65_536
Row = Mapping[str, Any]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return every claim the rows can answer."""
    table = _Table(rows)
    return [claim for part in (_all_reduce, _broadcast, _loopback, _predictions) for claim in part(table)]


class _Table:
    """Rows by what they measured."""

    def __init__(self, rows: Iterable[Row]) -> None:
        keys = ("hosts", "rate", "engine", "operation", "strategy", "nbytes")
        self.rows = {tuple(row[key] for key in keys): row for row in rows}
        self.rates = sorted({row["rate"] for row in rows} - {"loopback", "none"})
        self.hosts = sorted({row["hosts"] for row in rows})

    def seconds(self, *key: Any) -> float | None:
        row = self.rows.get(key)
        return None if row is None else float(row["seconds"])

    def ratio(self, above: tuple[Any, ...], below: tuple[Any, ...]) -> Iterator[float]:
        """Yield one time over another, where both were measured."""
        numerator, denominator = self.seconds(*above), self.seconds(*below)
        if numerator is not None and denominator is not None:
            yield numerator / denominator


def _all_reduce(table: _Table) -> Iterator[Claim]:
    for hosts, rate in _places(table):
        own = (hosts, rate, "gloo", "all_reduce", "native", MEGABYTES_16)
        ours = (hosts, rate, "gloo", "all_reduce", "ring", MEGABYTES_16)
        for value in table.ratio(own, ours):
            yield Claim(f"{hosts} hosts: ring of 16 MB, speed over gloo's own", value, 0.97)
        small = (hosts, rate, "gloo", "all_reduce", "native", KILOBYTES_64)
        for value in table.ratio(small, (hosts, rate, "mpi", "all_reduce", "ring", KILOBYTES_64)):
            if hosts > 2:
                yield Claim(f"{hosts} hosts: ring of 64 KB on MPI, speed over gloo's own", value, 3.0)


def _broadcast(table: _Table) -> Iterator[Claim]:
    over_tree = {4: 1.7, 8: 2.4}
    for engine in ("gloo", "mpi"):
        for hosts, rate in _places(table):
            pipeline = (hosts, rate, engine, "broadcast", "linear_pipeline", MEGABYTES_16)
            row = table.rows.get(pipeline)
            if row is not None and hosts == 4:
                value = row["seconds"] / row["floor_seconds"]
                yield Claim(f"4 hosts, {engine}: pipelined broadcast of 16 MB over bytes / rate", value, 1.15, True)
            for value in table.ratio((hosts, rate, engine, "broadcast", "spanning_tree", MEGABYTES_16), pipeline):
                if hosts in over_tree:
                    text = f"{hosts} hosts, {engine}: pipelined broadcast, speed over the spanning tree"
                    yield Claim(text, value, over_tree[hosts])
            if hosts == 8:
                for value in table.ratio(pipeline, (2, rate, engine, "broadcast", "linear_pipeline", MEGABYTES_16)):
                    yield Claim(f"{engine}: pipelined broadcast, time on 8 hosts over 2", value, 1.2, True)
    for hosts, rate in _places(table):
        for operation, wanted in (("broadcast", 1.8), ("reduce", 2.3)):
            own = (hosts, rate, "mpi", operation, "native", MEGABYTES_16)
            for value in table.ratio(own, (hosts, rate, "mpi", operation, "linear_pipeline", MEGABYTES_16)):
                if hosts > 2:
                    yield Claim(f"{hosts} hosts: pipelined {operation} on MPI, speed over Open MPI's", value, wanted)


def _loopback(table: _Table) -> Iterator[Claim]:
    for hosts in table.hosts:
        for operation, strategy in (("all_reduce", "ring"), ("broadcast", "linear_pipeline")):
            own = (hosts, "loopback", "gloo", operation, "native", MEGABYTES_16)
            for value in table.ratio(own, (hosts, "loopback", "gloo", operation, strategy, MEGABYTES_16)):
                yield Claim(f"loopback, {hosts} ranks: {strategy} {operation} of 16 MB, speed over gloo's", value, 1.0)


def _predictions(table: _Table) -> Iterator[Claim]:
    for row in table.rows.values():
        if row["rate"] in table.rates and row["nbytes"] > 1_000_000 and row["predicted_seconds"]:
            error = abs(row["predicted_seconds"] / row["seconds"] - 1)
            what = f"{row['strategy']} {row['operation']} of {row['nbytes'] // 1_000_000} MB"
            text = f"{row['hosts']} hosts, {row['engine']}: simulator's error for {what}"
            yield Claim(text, error, 0.10, True)


def _places(table: _Table) -> Iterator[tuple[int, str]]:
    return ((hosts, rate) for hosts in table.hosts for rate in table.rates)
