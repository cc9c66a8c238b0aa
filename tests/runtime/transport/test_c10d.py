"""The same strategies over gloo, in real processes."""

import contextlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import ErrorType

pytest.importorskip("torch")
from every_call import dense_calls, sparse_calls
from penstock.runtime import transport
from penstock.runtime.transport import c10d
from penstock.runtime.views import DTYPES
from runtime.oracle import check, random_tensors
from runtime.workers import (
    disagree_about_size,
    make_different_known_calls,
    reduce_sparsely,
    run_cases,
    run_on_a_subgroup,
)
from sparse_oracle import dyadic
from spawn import spawn

NATIVE_LACKS = {"int16"}


def cases(world_size: int) -> list[tuple[str, str, int, str, int]]:
    """Every strategy with sizes around the world size and one of several blocks; every element type with a ring."""
    sizes = (0, 1, world_size - 1, 10 * world_size + 1, 200_003)
    chosen = [
        (operation, strategy, numel, "float32", world_size - 1)
        for operation, strategy in sorted(dense_calls())
        for numel in sizes
    ]
    chosen += [("all_reduce", "ring", 1001, dtype, 0) for dtype in DTYPES]
    chosen += [("all_reduce", "native", 1001, dtype, 0) for dtype in set(DTYPES) - NATIVE_LACKS]
    return chosen


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_strategy_does_over_gloo_what_its_collective_promises(world_size: int) -> None:
    chosen = cases(world_size)
    results = spawn(world_size, run_cases, chosen)
    for index, (operation, _, numel, dtype, root) in enumerate(chosen):
        inputs = random_tensors(world_size, numel, dtype)
        outputs = [result[index] for result in results]
        check(operation, inputs, outputs, dtype, root)


def test_a_process_group_other_than_the_default_one_works() -> None:
    assert spawn(3, run_on_a_subgroup) == [[0.0] * 5, [3.0] * 5, [3.0] * 5]


def test_ranks_that_disagree_are_told_before_data_moves() -> None:
    for message in spawn(3, disagree_about_size):
        assert message == "numel is 11 on rank 2 and 10 on rank 0; all ranks must make the same call"


def test_different_known_calls_time_out_instead_of_aborting_the_process() -> None:
    for rank, message in enumerate(spawn(3, make_different_known_calls)):
        mine, theirs = (1000, 2000) if rank == 1 else (2000, 1000)
        assert message.startswith(f"ring: rank {rank}, step ")
        assert f" is in call 3, all_reduce by ring of {theirs} float32 (program " in message
        assert f"; this rank is in call 3, all_reduce by ring of {mine} float32 (program " in message
        assert message.endswith("; all ranks must make the same calls in order")


def test_native_refuses_what_gloo_lacks() -> None:
    with pytest.raises(Exception, match=r"native on torch.distributed: no int16; choose another strategy"):
        spawn(1, run_cases, [("all_reduce", "native", 4, "int16", 0)])


def test_sparse_all_reduces_over_gloo_lose_nothing_and_agree() -> None:
    gradients = dyadic(np.random.default_rng(0), (3, 3, 20_000))
    results = spawn(3, reduce_sparsely, gradients, 0.01)
    for _, strategy in sparse_calls():
        applied, kept = (np.array([result[strategy][part] for result in results]) for part in (0, 1))
        assert all(np.array_equal(one, applied[0]) for one in applied)
        assert np.array_equal(applied[0].sum(axis=0) + kept.sum(axis=0), gradients.sum(axis=(0, 1)))


class Nccl:
    """What a process group has for GPUs; `abort` waits as long as told."""

    def __init__(self, error: ErrorType = ErrorType.SUCCESS, seconds: float = 0.0) -> None:
        self._error, self._seconds, self.aborted = error, seconds, False

    def get_error(self) -> ErrorType:
        return self._error

    def abort(self) -> None:
        time.sleep(self._seconds)
        self.aborted = True


class Group:
    """A process group with a backend for each kind of device."""

    __slots__ = ("__weakref__", "_backends")

    def __init__(self, **backends: Any) -> None:
        self._backends = backends

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self._backends]

    def _get_backend(self, device: torch.device) -> Any:
        return self._backends[device.type]


def test_what_nccl_has_given_up_is_known_in_the_group_and_in_ours_of_the_same_ranks() -> None:
    gloo = Nccl(ErrorType.COMM_ERROR)  # which is not asked: messages of the host say it themselves
    group = Group(cpu=gloo, cuda=Nccl())
    assert c10d.device_failure(group) is None
    assert c10d.device_failure(Group(cuda=object())) is None  # another engine
    ours = Group(cuda=Nccl(ErrorType.TIMEOUT))
    c10d.keep_device_group(group, ours)
    assert c10d.device_failure(group) == "NCCL gave up its messages (timeout)"
    c10d.abort_devices(group)
    backends = [group._backends["cuda"], ours._backends["cuda"]]
    assert [each.aborted for each in (gloo, *backends)] == [False, True, True]


def test_nccl_is_aborted_soon_after_it_has_failed_and_only_then() -> None:
    nccl = Nccl()
    group = Group(cuda=nccl)
    c10d.watch_devices(group)
    c10d.watch_devices(group)
    assert sum(each.name == "penstock-nccl" for each in threading.enumerate()) == 1
    time.sleep(2 * c10d._WATCH_SECONDS)
    assert not nccl.aborted
    nccl._error = ErrorType.COMM_ERROR
    for _ in range(300):
        if nccl.aborted:
            break
        time.sleep(0.1)
    assert nccl.aborted


def test_the_thread_that_watches_a_group_ends_with_it() -> None:
    group = Group(cuda=Nccl())
    c10d.watch_devices(group)
    (thread,) = (each for each in threading.enumerate() if each.name == "penstock-nccl")
    del group
    thread.join(30)
    assert not thread.is_alive()


def test_an_nccl_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_gave_up", threading.Event())
    monkeypatch.setattr(c10d, "_ANSWER_SECONDS", 0.01)
    started = time.monotonic()
    c10d.abort_devices(Group(cuda=Nccl(seconds=5.0)))
    assert time.monotonic() - started < 4
    monkeypatch.setattr(c10d, "dist", SimpleNamespace(all_reduce=lambda *_, **__: time.sleep(5)))
    monkeypatch.setattr(c10d.torch.cuda, "device", lambda _device: contextlib.nullcontext())
    with pytest.raises(ConnectionError, match=r"NCCL did not connect the ranks within 0\.01 s"):
        c10d.connect_devices(Group(), torch.device("cpu"), 0.01, transport.never)


def test_a_store_whose_process_is_stopped_does_not_hold_up_a_new_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(transport, "_gave_up", threading.Event())
    monkeypatch.setattr(c10d, "_ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(c10d, "_store", lambda _group: SimpleNamespace(delete_key=lambda _key: goes_on.wait(60)))
    monkeypatch.setattr(c10d, "_known", lambda _group: SimpleNamespace(group_name="ours"))
    monkeypatch.setattr(c10d, "group_timeout", lambda _group: None)
    monkeypatch.setattr(c10d, "dist", SimpleNamespace(get_rank=lambda _group: 1, get_world_size=lambda _group: 2))
    with pytest.raises(ConnectionError, match="the store in which the ranks met does not answer"):
        c10d.C10dTransport(SimpleNamespace(), parent=SimpleNamespace())
    goes_on.set()
