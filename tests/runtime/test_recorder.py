"""What a recorder notes, against the program that ran."""

from collections import Counter

import numpy as np

from penstock.program import Instruction, Op
from penstock.runtime import Communicator
from penstock.runtime.executor import prepare
from penstock.runtime.recorder import Note, Recorder
from penstock.runtime.transport.memory import MemoryTransport
from runtime.programs import Halves, coded_exchange, ring
from runtime.threads import run_ranks


def record_ring(transport: MemoryTransport) -> Recorder:
    recorder = Recorder()
    prepare(ring(3, 30), transport, "float32").run(np.ones(30, np.float32), recorder=recorder)
    return recorder


def test_every_instruction_is_noted_once_and_none_ends_before_what_it_waits_for() -> None:
    program = ring(3, 30)
    for rank, recorder in enumerate(run_ranks(3, record_ring)):
        assert Counter(note.instruction for note in recorder.notes) == Counter(program.ranks[rank])
        ended = {note.instruction: note.end_seconds for note in recorder.notes}
        for note in recorder.notes:
            assert note.start_seconds <= note.end_seconds
            for earlier in note.instruction.after:
                assert ended[program.ranks[rank][earlier]] <= note.end_seconds


def test_a_message_ends_on_the_receiver_after_it_started_on_the_sender() -> None:
    notes = [note for recorder in run_ranks(3, record_ring) for note in recorder.notes]
    for source in range(3):
        sends = sorted(n.start_seconds for n in notes if n.rank == source and n.instruction.op is Op.SEND)
        target = (source + 1) % 3
        recvs = sorted(n.end_seconds for n in notes if n.rank == target and n.instruction.op is Op.RECV)
        assert len(sends) == len(recvs) == 4
        assert all(started <= ended for started, ended in zip(sends, recvs, strict=True))


def test_a_coded_exchange_shows_encode_send_recv_decode_and_merge() -> None:
    def rank(transport: MemoryTransport) -> Recorder:
        recorder = Recorder()
        prepared = prepare(coded_exchange(8), transport, "float32", codec=Halves())
        prepared.run(np.ones(8, np.float32), recorder=recorder)
        return recorder

    for number, recorder in enumerate(run_ranks(2, rank)):
        timeline = recorder.timeline()
        ops = {"encode", "decode", "send", "recv", "merge"}
        assert {span.name.split()[0] for span in timeline.spans} == ops
        assert {span.name.split()[0] for span in timeline.lane("communication")} == {"send", "recv"}
        assert {span.name.split()[0] for span in timeline.lane("computation")} == ops - {"send", "recv"}
        assert {span.rank for span in timeline.spans} == {number}
        assert min(span.start_seconds for span in timeline.spans) == 0.0
        assert timeline.lane("computation")[0].end_seconds <= timeline.lane("communication")[0].end_seconds


def test_spans_of_a_lane_do_not_overlap() -> None:
    recorder = Recorder()
    send = Instruction(Op.SEND, peer=1)
    recorder.notes = [Note("first", 0, send, 1.0, 3.0), Note("first", 0, send, 2.0, 5.0), Note("", 0, send, 2.5, 4.0)]
    spans = recorder.timeline(origin_seconds=0.5).spans
    assert [(span.start_seconds, span.end_seconds) for span in spans] == [(0.5, 2.5), (2.5, 3.5), (3.5, 4.5)]
    assert [span.name for span in spans] == ["first: send to 1", "send to 1", "first: send to 1"]


def test_a_communicator_records_only_while_it_has_a_recorder() -> None:
    def rank(transport: MemoryTransport) -> tuple[list[Note], int]:
        communicator = Communicator(transport, timeout_seconds=120)
        values, recorder = np.ones(100, np.float32), Recorder()
        communicator.all_reduce(values)
        communicator.recorder = recorder
        communicator.all_reduce(values)
        communicator.all_reduce(values)
        notes = list(recorder.notes)
        recorder.clear()
        communicator.recorder = None
        communicator.all_reduce(values)
        return notes, len(recorder.notes)

    for notes, left in run_ranks(2, rank):
        assert len(notes) == 2 * len({note.instruction for note in notes}) > 0
        assert left == 0
