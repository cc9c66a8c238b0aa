"""Measure the shipped traces on this machine's GPU.

`python -m penstock.bench.measure_traces FILE` profiles the ten models and writes one record with their traces and with
what profiling cost; `... FILE --install` writes the record's traces over the shipped files, marked as measured.
Needs torch and nothing else, so that it runs on a borrowed GPU.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.bench.record import make_record, save_record
from penstock.fields import Fields, read_json
from penstock.trace import Trace, save_trace, trace_document, trace_from_fields
from penstock.traces import shipped

SOURCE = "penstock.bench.measure_traces"
FOLDER = Path(__file__).parents[1] / "traces"


def measure(
    names: Sequence[str], device: str, iterations: int, warmup: int, rounds: int = 20
) -> Iterator[dict[str, Any]]:
    """Yield a record after each model, of all so far: a trace by name, and the profiler's overhead on that model."""
    from penstock.bench.profile_overhead import overhead_row
    from penstock.zoo import find_task
    from penstock.zoo.training import profile_task

    rows, traces = [], {}
    for name in names:
        task = find_task(name)
        profile = profile_task(task, device=device, iterations=iterations, warmup=warmup, source=SOURCE)
        traces[name] = trace_document(to_nanosecond(profile.trace))
        rows.append(overhead_row(name, device, rounds, block=3, warmup=5))
        _say(f"{name}: {profile.trace.compute_seconds * 1e3:.2f} ms, overhead {rows[-1]['overhead']:.2%}")
        yield make_record("traces", rows, traces=traces)


def to_nanosecond(trace: Trace) -> Trace:
    """Return the trace with times rounded to what a clock can mean."""
    tensors = tuple(replace(each, backward_seconds=round(each.backward_seconds, 9)) for each in trace.tensors)
    return replace(trace, forward_seconds=round(trace.forward_seconds, 9), tensors=tensors)


def install(path: Path, folder: Path = FOLDER) -> tuple[str, ...]:
    """Write the traces of a record into `folder`; return their names."""
    traces = read_json(path, "penstock-bench/1", _traces)
    for name, trace in traces.items():
        save_trace(trace, folder / f"{name}.json")
    return tuple(traces)


def _traces(fields: Fields) -> dict[str, Trace]:
    return {name: trace_from_fields(trace) for name, trace in fields.mapping("traces")}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, or install what was measured."""
    parser = argparse.ArgumentParser(description="measure the shipped traces on this machine")
    parser.add_argument("file", type=Path, help="the record")
    parser.add_argument("--install", action="store_true", help="write the record's traces over the shipped files")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--models", default=",".join(shipped()))
    arguments = parser.parse_args()
    if arguments.install:
        _say(f"wrote {', '.join(install(arguments.file))}")
        return
    names = arguments.models.split(",")
    for record in measure(names, arguments.device, arguments.iterations, arguments.warmup):
        save_record(record, arguments.file)  # after every model: a borrowed machine may be taken back


if __name__ == "__main__":
    main()
