"""Timelines as Chrome trace JSON, which Perfetto and chrome://tracing open.

Several timelines can go into one file, each as a process of its own: predicted above measured.
"""

import os
from collections.abc import Mapping
from typing import Any

from penstock.fields import write_json
from penstock.timeline import BUCKET_ENDS, COMPUTE, Span, Timeline

_MICROSECONDS = 1e6  # Chrome traces count microseconds


def perfetto_document(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return the Chrome trace of named timelines: a process per timeline and rank, a thread per lane.

    Viewers colour a slice by its name. So a bucket's instructions have the bucket's name, and say what they are in
    their arguments: one colour in all lanes, predicted and measured.
    """
    events: list[dict[str, Any]] = []
    pid = 0
    for title, timeline in timelines.items():
        rows, named = timeline.rows, set[int]()
        several = len({rank for rank, _ in rows}) > 1
        for tid, ((rank, lane), spans) in enumerate(rows.items(), start=1):
            if rank not in named:
                pid += 1
                named.add(rank)
                events.append(_metadata("process_name", pid, 0, f"{title}, rank {rank}" if several else title))
            events.append(_metadata("thread_name", pid, tid, lane))
            events.extend(_slice(span, pid, tid) for span in spans)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _slice(span: Span, pid: int, tid: int) -> dict[str, Any]:
    name, _, instruction = (span.name, "", "") if span.lane == COMPUTE else span.name.partition(BUCKET_ENDS)
    return {
        "ph": "X",
        "name": name,
        "cat": span.lane,
        "pid": pid,
        "tid": tid,
        "ts": span.start_seconds * _MICROSECONDS,
        "dur": span.seconds * _MICROSECONDS,
        "args": {"instruction": instruction} if instruction else {},
    }


def save_perfetto(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Write named timelines to `path` as one Chrome trace."""
    write_json(path, perfetto_document(timelines))


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
