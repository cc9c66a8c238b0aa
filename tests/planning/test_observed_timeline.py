"""Measured timelines: torch's clocks and ours on one axis."""

import pytest

import torch_measuring as training
from penstock.planning.observed import Sent, communication_seconds, measured_timeline
from penstock.program import Instruction, Op
from penstock.runtime.recorder import Note, Recorder
from penstock.timeline import COMPUTE, Span, Timeline
from spawn import spawn

MS = 1_000_000  # nanoseconds
DATA = {
    "forward_compute_time": 10 * MS,
    "backward_compute_time": 20 * MS,
    "backward_comm_time": 15 * MS,
    "backward_compute_comm_overlap_time": 12 * MS,
}


def test_before_the_first_iteration_there_is_nothing():
    assert measured_timeline({}, [], 0.0, 0) is None


def test_native_communication_is_one_span_where_torch_saw_it():
    timeline = measured_timeline(DATA, [], 0.0, 3)
    assert [(span.name, span.lane, span.rank) for span in timeline.spans] == [
        ("forward", COMPUTE, 3),
        ("backward", COMPUTE, 3),
        ("all buckets", "network", 3),
    ]
    assert timeline.spans[2].start_seconds == pytest.approx(0.018)
    assert timeline.iteration_seconds == pytest.approx(0.033)
    assert timeline.non_overlapped_seconds == pytest.approx(0.003)


def test_our_buckets_are_counted_from_the_start_of_the_forward_pass():
    timeline = measured_timeline(DATA, [Sent("a .. b", 100.02, 100.03), Sent("c", 100.03, 100.05)], 100.0, 0)
    assert [span.name for span in timeline.lane("network")] == ["a .. b", "c"]
    assert timeline.iteration_seconds == pytest.approx(0.05)
    assert communication_seconds(timeline) == pytest.approx(0.03)


def test_buckets_that_were_queued_on_a_device_are_timed_by_torchs_events_alone():
    """The host queued both within a millisecond, and recorded instructions of the one that it sent."""
    notes = Recorder()
    notes.notes.append(Note("a .. b", 0, Instruction(Op.SEND, peer=1), 100.02, 100.03))
    sent = [Sent("a .. b", 100.02, 100.03), Sent("c", 100.03, 100.0301, is_queued=True)]
    queued = measured_timeline(DATA, sent, 100.0, 0, notes)
    assert queued == measured_timeline(DATA, [], 0.0, 0)
    assert communication_seconds(queued) == pytest.approx(0.015)
    assert {span.lane for span in measured_timeline(DATA, sent[:1], 100.0, 0, notes).spans} > {"communication"}


def test_communication_counts_from_the_first_message_to_the_last_arrival():
    spans = (Span("f", COMPUTE, 0, 5), Span("a", "push", 1, 2), Span("a", "pull", 3, 4))
    assert communication_seconds(Timeline(spans)) == 3
    assert communication_seconds(Timeline(())) == 0


@pytest.fixture(scope="module")
def ranks():
    """Timelines of two ranks, by the engine and by a ring."""
    return spawn(2, training.timelines)


def test_every_iteration_is_timed_on_every_rank(ranks):
    for number, (native, ring, planned) in enumerate(ranks):
        for timeline in (native, ring):
            assert timeline.compute_seconds > 0
            assert {span.rank for span in timeline.spans} == {number}
            assert timeline.iteration_seconds < 60
        assert [span.name for span in native.lane("network")] == ["all buckets"]
        assert sorted(span.name for span in ring.lane("network")) == sorted(planned)  # lanes start in any order
