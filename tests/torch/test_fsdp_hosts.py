"""Sharded training by four NCCL ranks on two emulated hosts; `python tests/fsdp_hosts.py` does it without pytest."""

import pytest

torch = pytest.importorskip("torch")
import fsdp_hosts  # noqa: E402

pytestmark = pytest.mark.root
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", fsdp_hosts.CHECKS)
def test_four_ranks_on_one_gpu_train_as_torch_s_own_hsdp_does(name):
    assert fsdp_hosts.CHECKS[name]("cuda")  # what it saw; it raises where something is wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", fsdp_hosts.CHECKS)
def test_the_checks_themselves_hold_over_gloo(name):
    assert fsdp_hosts.CHECKS[name]("cpu")
