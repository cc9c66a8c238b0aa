"""A resolved call (`Communicator.prepare_all_reduce`) does what `all_reduce` does, and takes few steps to do it."""

import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.codecs.feedback import DeferredResidual
from penstock.codecs.registry import make_codec
from penstock.errors import PenstockError, TransportError
from penstock.runtime import Communicator, communicator
from penstock.runtime.transport.memory import Fabric, MemoryTransport
from runtime.threads import outcomes, run_ranks

PARTS = (0, 100, 130, 1000)
PACKAGE = str(Path(penstock.__file__).parent)


def gradients(rank: int, numel: int = PARTS[-1]) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(numel, np.float32)


@pytest.mark.parametrize(("spec", "strategy"), [("onebit", "ring"), ("graddrop", "all_gather"), ("sparse", "gtopk")])
def test_a_call_gives_the_bits_of_all_reduce_in_every_step(spec: str, strategy: str) -> None:
    def steps(transport: MemoryTransport, once: bool) -> list[bytes]:
        communicator, codec = Communicator(transport), make_codec(spec, transport.rank, on_nonfinite="note")
        residual, found = DeferredResidual(np.zeros(PARTS[-1], np.float32)), []
        call = communicator.prepare_all_reduce(strategy, codec, PARTS)
        for _ in range(4):
            data = gradients(transport.rank)
            if once:
                call.run(data, residual, scale=1 / 3)
            else:
                communicator.all_reduce(data, strategy, codec, residual, PARTS, scale=1 / 3)
            found.append(data.tobytes())
        return [*found, residual.values().tobytes()]

    prepared = run_ranks(3, lambda transport: steps(transport, True))
    assert prepared == run_ranks(3, lambda transport: steps(transport, False))
    assert prepared[0][:4] == prepared[1][:4] == prepared[2][:4]


def test_a_call_takes_data_of_another_size_and_type() -> None:
    def rank(transport: MemoryTransport) -> list[float]:
        call = Communicator(transport).prepare_all_reduce("ring")
        found = []
        for data in (np.ones(10, np.float32), np.ones(7, np.float64), np.ones(10, np.float32)):
            call.run(data)
            found.append(float(data.sum()))
        return found

    assert run_ranks(2, rank) == [[20.0, 14.0, 20.0]] * 2


def test_a_call_says_whether_its_rank_encodes() -> None:
    def rank(transport: MemoryTransport) -> bool:
        codec = make_codec("onebit", 0, on_nonfinite="note")
        return Communicator(transport).prepare_all_reduce("hierarchical(ranks_per_node=2)", codec).encodes

    assert run_ranks(4, rank) == [True, False, True, False]


def test_a_call_of_a_failed_communicator_says_so() -> None:
    fabric = Fabric(2)

    def rank(transport: MemoryTransport) -> str:
        call = Communicator(transport, timeout_seconds=5).prepare_all_reduce("ring")
        call.run(np.ones(4, np.float32))
        if transport.rank == 1:
            fabric.kill(1)
            return ""
        with pytest.raises(TransportError):
            call.run(np.ones(4, np.float32))
        with pytest.raises(PenstockError, match="failed before"):
            call.run(np.ones(4, np.float32))
        return "said"

    assert outcomes(2, rank, fabric) == ["said", ""]


def calls_of(function: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return (file, function) of the package's own Python calls, in order of their first."""
    found: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            found.setdefault((code.co_filename.removeprefix(PACKAGE), code.co_qualname), None)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return list(found)


@pytest.mark.parametrize(
    ("spec", "strategy", "functions", "files"),
    [("onebit", "ring", 15, 6), ("onebit", "all_gather", 15, 6), ("dgc", "ring", 18, 7)],  # sizes of dgc's vary
)
def test_a_call_is_few_functions_in_few_files_from_kernels_and_messages(
    spec: str, strategy: str, functions: int, files: int
) -> None:
    def rank(transport: MemoryTransport) -> list[tuple[str, str]]:
        codec = make_codec(spec, transport.rank, on_nonfinite="note")
        data, residual = gradients(transport.rank), DeferredResidual(np.zeros(PARTS[-1], np.float32))
        call = Communicator(transport).prepare_all_reduce(strategy, codec, PARTS)
        for _ in range(3):
            call.run(data, residual, scale=0.5)
        return calls_of(lambda: next(call.steps(data, residual, scale=0.5), None))  # as an exchange

    for found in run_ranks(2, rank):
        ours = [one for one in found if not one[0].startswith("/runtime/transport/")]  # the engine's own
        assert len(ours) <= functions, ours
        assert len({file for file, _ in ours}) <= files, ours
        assert set(chain(*ours)) >= {"Call.steps", "Prepared._perform"}


def test_what_the_host_sends_of_a_device_shares_no_memory_of_kernels_with_what_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first buckets after a plan may hold tensors of several routes: the two then run at the same time."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton", reason="install penstock[gpu] to test codecs on a device")
    monkeypatch.setattr(communicator, "is_on_cuda", lambda data: isinstance(data, torch.Tensor))
    codec = make_codec("onebit", 0, defers_nonfinite_check=True)
    ranks, data = Communicator(Fabric(1).transport(0), messages=object()), torch.zeros(8)
    forms = []
    for by_host in (False, True):
        call = ranks.prepare_all_reduce("ring", codec, by_host=by_host)
        call._look(data, None)
        forms.append(call._form[0])
    assert forms[0].many is not forms[1].many
    assert forms[0].replays is not forms[1].replays
