"""Ranks agree over any engine: all get the same, what rank 0 raises is raised on all, and a lost rank is named."""

import os
import pickle
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from penstock.curves import CodecCurves, Curve
from penstock.errors import FormatError, PlanError, TransportError
from penstock.exchange.compression import Compression
from penstock.network import LinearCost, Network
from penstock.plan import Bucket, Plan, Route
from penstock.planning.agree import TransportRanks, from_rank_0, nodes_of, pack, text_nbytes, unpack
from penstock.planning.planning import Decision, Planning
from penstock.planning.survey import plan_over
from penstock.runtime.transport import CHECK_TAG
from penstock.runtime.transport.memory import Fabric
from penstock.timeline import Span, Timeline
from penstock.trace import Tensor, Trace
from runtime.threads import outcomes, run_ranks


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_gets_every_value_by_rank(world_size: int) -> None:
    values = [{"rank": rank, "text": "x" * 1000 * rank} for rank in range(world_size)]

    def rank(transport):
        ranks = TransportRanks(transport)
        return ranks.gather(values[transport.rank], "testing"), ranks.from_first(transport.rank + 7, "testing")

    assert run_ranks(world_size, rank) == [(values, 7)] * world_size


def test_threads_of_one_process_are_on_one_host() -> None:
    assert run_ranks(3, lambda transport: nodes_of(TransportRanks(transport))) == [((0, 1, 2),)] * 3


def test_what_rank_0_raises_is_raised_on_every_rank() -> None:
    def make():
        raise PlanError("no such thing")

    found = outcomes(2, lambda transport: from_rank_0(make, TransportRanks(transport)))
    assert [str(each) for each in found] == ["rank 0 could not plan: PlanError: no such thing"] * 2


def test_a_rank_that_is_gone_is_named() -> None:
    fabric = Fabric(2)
    fabric.kill(1)
    with pytest.raises(TransportError, match=r"rank 0.*1, testing"):
        TransportRanks(fabric.transport(0)).gather(0, "testing")


TRACE = Trace("toy", "cpu", 1, "float32", 1e-3, tuple(Tensor(name, 1 << 20, 1e-3) for name in "dcba"))
CURVES = CodecCurves(0.03, Curve(1e-9, 1e-5), Curve(1e-9, 1e-5), block_merge=Curve(0.0, 0.0))
NETWORK = Network(2, 1e-4, 1e-8, 1e-10, {"ring": LinearCost(1e-3, 1e-10)}, {"onebit": CURVES})
PLAN = Plan("toy", 2, "exact", (Bucket(("a", "b"), 8, "ring", "onebit"),), timeline=Timeline((Span("a", "x", 0, 1.5),)))
VALUES = [
    None,
    [True, -1, 0.1, float("inf"), "x", b"\x00\xff"],
    {"a": (), 3: {"b": [(1, 2)]}, ("x", 1): None},
    Route("ring", "onebit", 4),
    Decision(PLAN, TRACE, NETWORK, (("exact", 0.25), ("wfbp", 1)), "a reason", ("one", "two")),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was_sent(value):
    found = unpack(*pack(value), "here")
    assert (found, type(found)) == (value, type(value))


def test_numbers_of_numpy_come_back_as_pythons():
    found = unpack(*pack([np.int64(7), np.float32(0.5), np.bool_(True)]), "here")
    assert [(each, type(each)) for each in found] == [(7, int), (0.5, float), (True, bool)]


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, len, [np.zeros(2)], Fabric], ids=["object", "set", "function", "array", "class"]
)
def test_what_is_no_plain_value_is_not_sent(value):
    with pytest.raises(PlanError, match=r"to tell other ranks; wanted numbers, strings, bytes, lists"):
        pack(value)


class Planted:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("planted",)


def sent(text: bytes) -> tuple[bytes, bytes]:
    """Return a message of any text, with the head that it would have."""
    return struct.pack("<8sQI", b"penstock", len(text), zlib.crc32(text)), text


HOSTILE = {
    "pickle": pickle.dumps(Planted()),
    "not JSON": b"\xff\xfe",
    "cut short": b'{"tuple": [1, 2',
    "deep": b"[" * 200_000,
    "long number": b"1" * 5000,
    "unknown class": b'{"Popen": [["sh"]]}',
    "two kinds": b'{"tuple": [], "dict": []}',
    "no kind": b"{}",
    "bytes": b'{"bytes": "?"}',
    "unhashable key": b'{"dict": [[[], 1]]}',
    "tuple of nothing": b'{"tuple": 3}',
    "missing fields": b'{"Route": ["ring"]}',
    "a list for a class": b'{"Route": {"dict": []}}',
    "wrong type": b'{"Route": [["ring"], null, 1]}',
    "truth for number": b'{"Route": ["ring", null, true]}',
    "list for tuple": b'{"Timeline": [[]]}',
    "a class's own check": b'{"LinearCost": [-1.0, 0.0, null]}',
    "infinite": b'{"LinearCost": [Infinity, 0.0, null]}',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_message_is_one_clear_error(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match=r"^here: text: found .*; wanted a value that a rank of this version of pen"):
        unpack(*sent(text), "here")
    assert not (tmp_path / "planted").exists()


def read(data: bytes, head_nbytes: int) -> object:
    """Read a message as a rank does."""
    head, text = data[:head_nbytes], data[head_nbytes:]
    return unpack(head, text[: text_nbytes(head, "here")], "here")


def test_any_changed_bit_is_found():
    head, text = pack(VALUES)
    for place in range(8 * (len(head) + len(text))):
        damaged = bytearray(head + text)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(FormatError, match=r"^here: (head|checksum): found "):
            read(bytes(damaged), len(head))


@pytest.mark.parametrize("length", [0, (1 << 32) + 1, (1 << 64) - 1])
def test_no_memory_is_taken_for_a_length_that_no_message_has(length):
    with pytest.raises(FormatError, match=r"^here: head: found "):
        text_nbytes(struct.pack("<8sQI", b"penstock", length, 0), "here")


def test_a_rank_that_sends_something_else_is_named_on_every_rank():
    def rank(transport):
        if transport.rank != 1:
            return TransportRanks(transport).gather(7, "testing")
        for part in sent(b'{"Popen": []}'):
            transport.isend(np.frombuffer(part, np.uint8).copy(), 0, CHECK_TAG).wait(60.0)
        return TransportRanks(transport).from_first(None, "testing")

    found = outcomes(3, rank)
    assert "message of rank 1 (testing): text: found" in str(found[0])
    assert str(found[2]) == str(found[0])


def test_what_rank_0_cannot_tell_is_refused_on_every_rank():
    found = outcomes(3, lambda transport: TransportRanks(transport, 60.0).from_first(object(), "testing"))
    assert [type(each) for each in found] == [PlanError] * 3
    assert {str(each)[:31] for each in found} == {"a object to tell other ranks; w"}


LINES = {"native": LinearCost(1e-1, 1e-8), "ring+onebit": LinearCost(1e-3, 1e-10)}


def test_ranks_without_torch_plan_together() -> None:
    network = Network(2, 1e-4, 1e-8, 1e-10, LINES)
    planning = Planning(strategy="ring", network=network, measurements=False)
    decisions = run_ranks(2, lambda transport: plan_over(transport, "memory", TRACE, Compression("onebit"), planning))
    assert decisions[0] == decisions[1]
    plan = decisions[0].plan
    assert {str(bucket.route) for bucket in plan.buckets} == {"ring+onebit"}
    assert sum(bucket.nbytes for bucket in plan.buckets) == 4 * (4 << 20)


def test_a_plan_that_is_given_is_taken() -> None:
    network = Network(1, 1e-4, 1e-8, 1e-10, LINES)
    (decision,) = run_ranks(1, lambda each: plan_over(each, "memory", TRACE, None, Planning(network=network)))
    (given,) = run_ranks(1, lambda each: plan_over(each, "memory", TRACE, None, Planning(plan=decision.plan)))
    assert given.plan == decision.plan


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # any import of torch now fails
import numpy as np
from penstock.exchange.compression import Compression
from penstock.exchange.exchange import Exchange
from penstock.planning.planning import Planning
from penstock.planning.survey import plan_over
from penstock.runtime.communicator import Communicator
from penstock.runtime.transport.mpi import MpiTransport
from penstock.trace import Tensor, Trace
import penstock.planning.explain, penstock.planning.observed, penstock.planning.observed
transport = MpiTransport()
trace = Trace("toy", "cpu", 1, "float32", 1e-3, tuple(Tensor(name, 5000, 1e-3) for name in "dcba"))
planning = Planning(measure_seconds=0.5, measurements=False)
plan = plan_over(transport, "mpi", trace, None, planning).plan
exchange = Exchange(Communicator(transport))
exchange.follow(plan)
exchange.begin()
for bucket in plan.buckets:
    values = np.full(5000 * len(bucket.tensors), 1.0 + transport.rank, np.float32)
    exchange.wait(exchange.start(exchange.bucket(bucket.tensors, [5000] * len(bucket.tensors)), values))
    assert (values == 1.5).all()
exchange.close()
print("ok", plan.hash)
"""
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun on PATH (pip install penstock[mpi])")
def test_ranks_of_mpi_measure_plan_and_exchange_without_torch() -> None:
    launch = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", "PYTHONPATH"]
    for _ in range(5):
        command = [*launch, sys.executable, "-c", WITHOUT_TORCH]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if "FitError" not in done.stderr:  # a busy machine, on all ranks alike
            break
    said = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert len(said) == 2, done.stderr
    assert said[0] == said[1]
