from dataclasses import replace

from penstock.report.found_runs import FoundRun
from penstock.report.perfetto import perfetto_document
from penstock.report.write_report import MOST_SPANS, run_timelines, step_window
from penstock.timeline import Span, Timeline
from report_samples import sample_runs


def found(*records):
    return [FoundRun(record.name, "run.json", record) for record in records]


def test_the_last_steps_stand_end_to_end_from_zero():
    steps = sample_runs()[0].steps
    window = step_window(steps, 10)
    assert len(window.spans) == 10
    assert window.spans[0].start_seconds == 0
    assert window.spans[0].name.startswith("step 231, loss ")
    for earlier, later in zip(window.spans, window.spans[1:], strict=False):
        assert earlier.end_seconds == later.start_seconds
    assert window.iteration_seconds == steps[-1].seconds - steps[-11].seconds


def test_a_window_wider_than_the_run_holds_all_of_it():
    steps = sample_runs()[0].steps
    assert len(step_window(steps, 10_000).spans) == len(steps)
    assert step_window(steps, 10_000).iteration_seconds == steps[-1].seconds


def test_no_window_and_no_steps_are_no_timeline():
    assert step_window((), 5).spans == ()
    assert step_window(sample_runs()[0].steps, 0).spans == ()


def test_clocks_that_step_back_make_an_empty_span():
    first, second = sample_runs()[0].steps[:2]
    assert step_window((second, replace(first, loss=None)), 2).spans[1].seconds == 0


def test_predicted_stands_above_measured():
    titles = list(run_timelines(found(sample_runs()[1]), 5))
    assert titles == [
        "exact plan, last steps", "exact plan, one iteration predicted", "exact plan, one iteration measured",
    ]  # fmt: skip


def test_parts_that_a_run_lacks_are_left_out():
    assert list(run_timelines(found(replace(sample_runs()[0], measured=None)), 0)) == []


def test_the_file_does_not_grow_with_the_timeline():
    many = Timeline(tuple(Span("s", "send", n * 1e-6, n * 1e-6, n % 4) for n in range(MOST_SPANS + 7)))
    document = perfetto_document(run_timelines(found(replace(sample_runs()[0], measured=many)), 3))
    assert sum(event["ph"] == "X" for event in document["traceEvents"]) == MOST_SPANS + 3
