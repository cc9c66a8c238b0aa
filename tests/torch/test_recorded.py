"""Measured timelines hold every instruction where that was asked for."""

import pytest

from penstock.planning.observed import NETWORK, Sent, communication_seconds, measured_timeline
from penstock.runtime.recorder import Recorder
from penstock.timeline import COMMUNICATION, COMPUTATION, COMPUTE
from recorded_training import recorded
from spawn import spawn

DATA = {
    "forward_compute_time": 2_000_000,
    "backward_compute_time": 3_000_000,
    "backward_compute_comm_overlap_time": 1_000_000,
    "backward_comm_time": 4_000_000,
}


@pytest.fixture(scope="module")
def ranks():
    return spawn(2, recorded, "onebit")


def lanes(timeline):
    return {span.lane for span in timeline.spans}


def test_instructions_stand_in_lanes_of_their_own_only_while_they_are_recorded(ranks):
    for before, during, after in ranks:
        assert lanes(before) == lanes(after) == {COMPUTE, NETWORK}
        assert lanes(during) == {COMPUTE, NETWORK, COMPUTATION, COMMUNICATION}
        ops = {
            lane: {span.name.split(": ")[1].split()[0] for span in during.lane(lane)}
            for lane in lanes(during) - lanes(before)
        }
        assert ops[COMMUNICATION] == {"send", "recv"}
        assert "encode" in ops[COMPUTATION]


def test_every_instruction_lies_within_its_bucket(ranks):
    for rank, (_, during, _) in enumerate(ranks):
        buckets = {span.name: span for span in during.lane(NETWORK)}
        details = [span for span in during.spans if span.lane not in (COMPUTE, NETWORK)]
        assert details
        for span in details:
            bucket = buckets[span.name.partition(":")[0]]
            assert bucket.start_seconds <= span.start_seconds <= span.end_seconds <= bucket.end_seconds
            assert span.rank == rank


def test_recording_does_not_change_what_counts_as_communication():
    sent = [Sent("a", 10.001, 10.004)]
    plain = measured_timeline(DATA, sent, 10.0, 0)
    assert communication_seconds(plain) == pytest.approx(0.003)
    assert communication_seconds(measured_timeline(DATA, sent, 10.0, 0, Recorder())) == pytest.approx(0.003)
