"""Tensors on a GPU through engines that move host memory: the bits of the host, and nothing waits for the device."""

import threading
import time

import numpy as np
import pytest

from penstock.runtime import Communicator
from penstock.runtime.transport.memory import MemoryTransport
from penstock.runtime.views import DTYPES
from runtime.oracle import check, random_tensors
from runtime.threads import run_ranks

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def as_torch(array: np.ndarray, dtype: str) -> "torch.Tensor":
    return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, dtype))


def reduced(inputs: list[np.ndarray], dtype: str, device: str, **options: object) -> list[bytes]:
    def rank(transport: MemoryTransport) -> bytes:
        tensor = as_torch(inputs[transport.rank].copy(), dtype).to(device)
        Communicator(transport, timeout_seconds=20).all_reduce(tensor, **options)
        return tensor.cpu().view(torch.uint8).numpy().tobytes()

    return run_ranks(len(inputs), rank)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", ["ring", "linear_pipeline", "recursive_doubling", "spanning_tree", "native"])
def test_a_tensor_on_the_device_is_reduced_to_the_bits_of_one_on_the_host(dtype: str, strategy: str) -> None:
    inputs = random_tensors(3, 300_001, dtype)
    on_device = reduced(inputs, dtype, "cuda", strategy=strategy)
    assert on_device == reduced(inputs, dtype, "cpu", strategy=strategy)
    assert len(set(on_device)) == 1


@pytest.mark.parametrize("numel", [0, 1, 2, 5, 70_000])
def test_any_number_of_elements_goes_through(numel: int) -> None:
    inputs = random_tensors(4, numel, "float32")
    outputs = [np.frombuffer(bits, np.float32) for bits in reduced(inputs, "float32", "cuda")]
    check("all_reduce", inputs, outputs, "float32", 0)


def test_a_tensor_that_is_not_contiguous_gets_its_result_back() -> None:
    def rank(transport: MemoryTransport) -> list[float]:
        whole = torch.arange(20.0, device="cuda").view(4, 5)
        Communicator(transport, timeout_seconds=20).all_reduce(whole[:, ::2])
        return whole.flatten().tolist()

    wanted = [value * (2 if value % 5 in (0, 2, 4) else 1) for value in range(20)]
    assert run_ranks(2, rank) == [wanted] * 2


def test_results_are_ordered_with_what_the_stream_did_before_and_does_after() -> None:
    def rank(transport: MemoryTransport) -> list[float]:
        communicator, stream = Communicator(transport, timeout_seconds=20), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                values = torch.zeros(500_000, device="cuda")
                torch.cuda._sleep(1_000_000)
                values.add_(1)  # late
                communicator.all_reduce(values)
                values.mul_(3)
            return values.unique().tolist()

    assert run_ranks(2, rank) == [[6.0]] * 2


def test_a_long_kernel_on_another_stream_is_not_waited_for() -> None:
    together = threading.Barrier(2)  # one rank's look at the whole device must not meet the other's long kernel

    def rank(transport: MemoryTransport) -> tuple[float, bool]:
        communicator, values = Communicator(transport, timeout_seconds=20), torch.ones(500_000, device="cuda")
        communicator.all_reduce(values)  # makes memory and program
        torch.cuda.synchronize()
        together.wait(20)
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            torch.cuda._sleep(4_000_000_000)  # about two seconds
        started = time.monotonic()
        communicator.all_reduce(values)
        torch.cuda.current_stream().synchronize()
        return time.monotonic() - started, other.query()

    for seconds, other_was_done in run_ranks(2, rank):
        assert not other_was_done
        assert seconds < 1.0


def test_pinned_memory_is_made_once() -> None:
    def rank(transport: MemoryTransport) -> set[int]:
        communicator, seen = Communicator(transport, timeout_seconds=20), set()
        for numel in (100_000, 50_000, 100_000):
            communicator.all_reduce(torch.ones(numel, device="cuda"))
            seen.add(communicator._staging.stage(torch.ones(1, device="cuda")).host.data_ptr())
        return seen

    assert [len(seen) for seen in run_ranks(2, rank)] == [1, 1]


def test_two_processes_share_one_device_over_gloo() -> None:
    from runtime.workers import reduce_on_the_device
    from spawn import spawn

    inputs = random_tensors(2, 300_001, "float32")
    outputs = spawn(2, reduce_on_the_device, 300_001)
    check("all_reduce", inputs, outputs, "float32", 0)
    assert outputs[0].tobytes() == outputs[1].tobytes()
