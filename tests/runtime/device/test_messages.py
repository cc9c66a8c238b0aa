"""Which ranks NCCL connects."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from penstock.runtime.device.messages import nccl_takes  # noqa: E402


def test_nccl_takes_more_ranks_than_gpus_only_as_hosts_of_their_own(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert [nccl_takes(ranks) for ranks in (1, 2, 3)] == [True, True, False]
    monkeypatch.setenv("NCCL_HOSTID", "rank0")
    assert nccl_takes(4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert not nccl_takes(1)
