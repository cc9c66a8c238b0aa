"""Which ranks NCCL connects, and by which groups."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from penstock.runtime.device import messages  # noqa: E402
from penstock.runtime.device.messages import device_messages, nccl_takes  # noqa: E402
from penstock.runtime.transport.c10d import group_timeout  # noqa: E402
from spawn import spawn  # noqa: E402


def test_nccl_takes_more_ranks_than_gpus_only_as_hosts_of_their_own(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert [nccl_takes(ranks) for ranks in (1, 2, 3)] == [True, True, False]
    monkeypatch.setenv("NCCL_HOSTID", "rank0")
    assert nccl_takes(4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert not nccl_takes(1)


def connect_over_gloo(rank):
    """Ask for messages of two groups with several timeouts, gloo in the place of NCCL; return what each has."""
    new_group, all_reduce = dist.new_group, dist.all_reduce
    torch.cuda.is_available = lambda: True
    dist.get_backend_config = lambda group: "cpu:gloo,cuda:nccl"
    dist.new_group = lambda ranks, **keywords: new_group(ranks, timeout=keywords["timeout"], backend="gloo")
    messages._options, messages.torch = (
        lambda: None,
        SimpleNamespace(cuda=torch.cuda, zeros=lambda *_, **__: torch.zeros(1)),
    )
    other = new_group([0, 1])
    asked = [(dist.group.WORLD, 300.0), (dist.group.WORLD, 20.0), (dist.group.WORLD, 300.0), (other, 20.0)]
    groups = [device_messages(*each)._group for each in asked]
    values = torch.ones(1)
    all_reduce(values, group=groups[1])
    return [group_timeout(each) for each in groups], [groups.index(each) for each in groups], float(values)


def test_messages_with_another_timeout_have_a_group_of_their_own():
    """The third asks as the first did, and shares its group."""
    seconds = [timedelta(seconds=each) for each in (300, 20, 300, 20)]
    assert spawn(2, connect_over_gloo) == [(seconds, [0, 1, 0, 3], 2.0)] * 2
