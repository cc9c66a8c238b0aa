"""Sharded training by four ranks on two emulated hosts; `python tests/fsdp_hosts.py` does it without pytest."""

import pytest

torch = pytest.importorskip("torch")
import fsdp_hosts  # noqa: E402

pytestmark = [pytest.mark.root, pytest.mark.timeout(1800)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module", params=[pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu]), "cpu"])
def found(request):
    """What is wrong in each check, all of them by one set of processes."""
    return fsdp_hosts.run_checks(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", fsdp_hosts.CHECKS)
def test_four_ranks_on_two_hosts_train_as_torch_s_own_hsdp_does(found, name):
    assert found[name] == ""
