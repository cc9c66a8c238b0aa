"""Timelines as Chrome trace JSON, which Perfetto and chrome://tracing open.

Several timelines can go into one file, each as a process of its own: predicted above measured.
"""

import os
from collections.abc import Mapping
from typing import Any

from penstock.fields import write_json
from penstock.timeline import Timeline

_MICROSECONDS = 1e6  # Chrome traces count microseconds


def perfetto_document(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return the Chrome trace of named timelines: a process per timeline and rank, a thread per lane."""
    events: list[dict[str, Any]] = []
    for title, timeline in timelines.items():
        ranks = sorted({span.rank for span in timeline.spans})
        lanes = list(dict.fromkeys(span.lane for span in timeline.spans))
        pids = {rank: len({event["pid"] for event in events}) + number for number, rank in enumerate(ranks, start=1)}
        for rank in ranks:
            name = title if len(ranks) == 1 else f"{title}, rank {rank}"
            events.append(_metadata("process_name", pids[rank], 0, name))
            events.extend(_metadata("thread_name", pids[rank], tid, lane) for tid, lane in enumerate(lanes, start=1))
        for span in timeline.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.lane,
                    "pid": pids[span.rank],
                    "tid": lanes.index(span.lane) + 1,
                    "ts": span.start_seconds * _MICROSECONDS,
                    "dur": span.seconds * _MICROSECONDS,
                }
            )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def save_perfetto(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Write named timelines to `path` as one Chrome trace."""
    write_json(path, perfetto_document(timelines))


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
