"""Programs that stay on the device: ranks are threads that share one GPU, and messages copies on it."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from every_call import dense_calls
from penstock.errors import StrategyError
from penstock.program import Collective, Program
from penstock.runtime import Communicator
from penstock.runtime.dtypes import DTYPES
from penstock.runtime.executor import prepare, program_digest
from penstock.runtime.transport.memory import MemoryTransport
from penstock.strategies import Options, build
from runtime.oracle import check, random_tensors
from runtime.programs import coded_exchange
from runtime.threads import run_ranks

torch = pytest.importorskip("torch")
from penstock.runtime.device.direct import Direct, Message  # noqa: E402  # needs torch

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OURS = sorted(which for which in dense_calls() if which[1] != "native")


class SharedDevice:
    """Messages between threads on one device, in order of pair, ordered by events as NCCL orders them by streams."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: dict[tuple[int, int], list[tuple[torch.Tensor, torch.cuda.Event]]] = {}

    def engine(self, rank: int) -> "Engine":
        return Engine(self, rank)


class Engine:
    def __init__(self, device: SharedDevice, rank: int) -> None:
        self.device, self.rank = device, rank

    def exchange(self, messages: Sequence[Message]) -> None:
        stream = torch.cuda.current_stream()
        with self.device.changed:
            for sent, memory, peer in messages:
                if sent:
                    copy, event = memory.clone(), torch.cuda.Event()
                    event.record(stream)
                    self.device.waiting.setdefault((self.rank, peer), []).append((copy, event))
            self.device.changed.notify_all()
        for sent, memory, peer in messages:
            if not sent:
                with self.device.changed:
                    queue = self.device.waiting.setdefault((peer, self.rank), [])
                    assert self.device.changed.wait_for(lambda q=queue: q, 20), "a message never came"
                    copy, event = queue.pop(0)
                stream.wait_event(event)
                memory.copy_(copy)
                copy.record_stream(stream)

    def collective(self, collective: Collective, tensor: "torch.Tensor", root: int) -> None:
        raise AssertionError("not in these tests")


def on_device(program: Program, inputs: list[np.ndarray], dtype: str) -> list[np.ndarray]:
    shared = SharedDevice()

    def rank(transport: MemoryTransport) -> np.ndarray:
        values = torch.from_numpy(inputs[transport.rank].copy().view(np.uint8)).view(getattr(torch, dtype)).cuda()
        digest = program_digest(program, dtype, None)
        direct = Direct(program, transport.rank, dtype, digest, shared.engine(transport.rank))
        kept = values.clone()
        for _ in range(2):  # scratch and events are used again
            values.copy_(kept)
            direct.run(values)
        return values.cpu().view(torch.uint8).numpy().view(inputs[0].dtype)

    return run_ranks(len(inputs), rank)


def on_host(program: Program, inputs: list[np.ndarray], dtype: str) -> list[np.ndarray]:
    outputs = [tensor.copy() for tensor in inputs]

    def rank(transport: MemoryTransport) -> None:
        values = torch.from_numpy(outputs[transport.rank].view(np.uint8)).view(getattr(torch, dtype))
        prepare(program, transport, dtype).run(values)

    run_ranks(len(inputs), rank)
    return outputs


@pytest.mark.parametrize(("operation", "strategy"), OURS)
@pytest.mark.gpu
@gpu[1]
def test_every_strategy_gives_the_bits_of_the_host(operation: str, strategy: str) -> None:
    for world_size, numel, block in ((1, 10, None), (2, 5, 2), (3, 10_001, 1000), (4, 40_000, None)):
        program = build(operation, strategy, world_size, numel, Options(block_numel=block, root=world_size - 1))
        inputs = random_tensors(world_size, numel, "float32")
        outputs = on_device(program, inputs, "float32")
        check(operation, inputs, outputs, "float32", world_size - 1)
        if operation in ("all_reduce", "broadcast", "all_gather"):
            assert [a.tobytes() for a in outputs] == [b.tobytes() for b in on_host(program, inputs, "float32")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.gpu
@gpu[1]
def test_every_element_type_gives_the_bits_of_the_host(dtype: str) -> None:
    program = build("all_reduce", "ring", 3, 30_001, Options(block_numel=5000))
    inputs = random_tensors(3, 30_001, dtype)
    ours, theirs = on_device(program, inputs, dtype), on_host(program, inputs, dtype)
    assert [a.tobytes() for a in ours] == [b.tobytes() for b in theirs]


@pytest.mark.gpu
@gpu[1]
def test_nccl_with_one_rank_runs_and_compares_programs_through_the_store(tmp_path) -> None:
    import torch.distributed as dist

    from penstock.runtime.device.nccl import NcclTransport

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        communicator, values = Communicator(NcclTransport(), timeout_seconds=20), torch.arange(10.0, device="cuda")
        for strategy in ("native", "ring", "recursive_doubling"):
            communicator.all_reduce(values, strategy=strategy)
        assert values.tolist() == list(range(10))
        with pytest.raises(StrategyError, match="tensor is in host memory; NCCL moves device memory"):
            communicator.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()


def test_encoded_programs_are_refused() -> None:
    with pytest.raises(StrategyError, match="coded exchange: encoded messages over NCCL; codecs run where gloo or MPI"):
        Direct(coded_exchange(4), 0, "float32", "", SharedDevice().engine(0))
