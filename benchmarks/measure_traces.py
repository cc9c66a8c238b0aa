"""Measure the shipped traces on this machine's GPU, and what profiling costs.

`python benchmarks/measure_traces.py FILE` profiles the ten models and writes one record with their traces and with what
profiling cost; `... FILE --install` writes the record's traces over the shipped files, marked as measured. Needs torch
and nothing else, so that it runs on a borrowed GPU.

What profiling costs: blocks of a few iterations with and without the profiler's hooks alternate, so that a slow moment
of the machine falls on both; each round gives one ratio, and the overhead is the median of the ratios less one.
Python's garbage collector is off while the clock runs, as in `timeit`: it strikes at random and for longer than what is
measured.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import penstock.traces
from penstock.bench.record import make_record, save_record
from penstock.fields import Fields, read_json
from penstock.planning.profile_summary import spread
from penstock.torch.clocks import device_name, synchronise
from penstock.torch.profile import Profiler
from penstock.trace import Trace, save_trace, trace_document, trace_from_fields
from penstock.traces import shipped
from penstock.zoo import find_task
from penstock.zoo.run_task import build, find_device, profile_task, training_step

SOURCE = "benchmarks/measure_traces.py"
FOLDER = Path(penstock.traces.__file__).parent
CPU_MODELS = ("resnet20", "vgg16_cifar", "gpt_small")


def overhead_rows(
    models: Sequence[str], device: str = "auto", rounds: int = 24, block: int = 3, warmup: int = 5
) -> Iterator[dict[str, Any]]:
    """Measure each model of the zoo with its usual batch; rows come as they are measured."""
    for model in models:
        yield overhead_row(model, device, rounds, block, warmup)


def overhead_row(model_name: str, device_text: str, rounds: int, block: int, warmup: int) -> dict[str, Any]:
    """Return both iteration times, the overhead, and how the trace's own total compares with the clock on the wall."""
    device, task = find_device(device_text), find_task(model_name)
    model = build(task, device)
    step = training_step(task, model, task.batch, device)
    profiler = Profiler(warmup=0)

    def timed() -> float:
        synchronise(device)
        with collector_off():
            start = perf_counter()
            for _ in range(block):
                step()
            synchronise(device)
            return (perf_counter() - start) / block

    def profiled() -> float:
        with profiler.attached(model):
            return timed()

    for _ in range(warmup):
        step()
    plain, watched = _alternate((timed, profiled), rounds)
    ratios = [b / a for a, b in zip(plain, watched, strict=True)]
    return {
        "model": task.name,
        "device": device_name(device),
        "batch": task.batch,
        "tensors": len(list(model.parameters())),
        "iteration_seconds": median(plain),
        "profiled_iteration_seconds": median(watched),
        "overhead": median(ratios) - 1,
        "overhead_spread": spread(ratios),
        "trace_seconds": profiler.trace().compute_seconds,
    }


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's garbage collector from running inside a `with` block."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _alternate(jobs: tuple[Callable[[], float], Callable[[], float]], rounds: int) -> tuple[list[float], list[float]]:
    """Run both jobs in each round, the order changing from round to round."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        for which in (0, 1) if index % 2 == 0 else (1, 0):
            times[which].append(jobs[which]())
    return times


def measure(
    names: Sequence[str], device: str, iterations: int, warmup: int, rounds: int = 20
) -> Iterator[dict[str, Any]]:
    """Yield a record after each model, of all so far: a trace by name, and the profiler's overhead on that model."""
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
