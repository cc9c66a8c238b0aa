"""Runs as a Perfetto file: their last steps, and one iteration of each, predicted above measured.

The file's size is bounded: by a window of steps, and by a number of spans for each timeline.
"""

from collections.abc import Sequence

from penstock.report.found_runs import FoundRun
from penstock.run_record import Step
from penstock.timeline import Span, Timeline

MOST_SPANS = 20_000  # of one timeline; about 3 MB of JSON


def run_timelines(runs: Sequence[FoundRun], last_steps: int) -> dict[str, Timeline]:
    """Return the timelines of all runs by title: the last steps, one iteration as predicted, one as measured."""
    found: dict[str, Timeline] = {}
    for run in runs:
        found[f"{run.name}, last steps"] = step_window(run.record.steps, last_steps)
        found[f"{run.name}, one iteration predicted"] = _bounded(run.record.predicted)
        found[f"{run.name}, one iteration measured"] = _bounded(run.record.measured)
    return {title: timeline for title, timeline in found.items() if timeline.spans}


def step_window(steps: Sequence[Step], count: int) -> Timeline:
    """Return the last `count` steps as spans, counted from the beginning of the first of them."""
    if count < 1 or not steps:
        return Timeline(())
    kept = steps[-count:]
    before = steps[-count - 1].seconds if len(steps) > count else 0.0
    starts = [before, *(step.seconds for step in kept[:-1])]
    return Timeline(
        tuple(
            Span(_step_name(step), "steps", start - before, max(start, step.seconds) - before)
            for step, start in zip(kept, starts, strict=True)
        )
    )


def _step_name(step: Step) -> str:
    loss = "not finite" if step.loss is None else f"{step.loss:.4g}"
    return f"step {step.step}, loss {loss}"


def _bounded(timeline: Timeline | None) -> Timeline:
    """Return the timeline's earliest spans, so many that the file stays small."""
    if timeline is None:
        return Timeline(())
    return Timeline(tuple(sorted(timeline.spans, key=lambda span: span.start_seconds)[:MOST_SPANS]))
