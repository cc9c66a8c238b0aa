"""NCCL over limited links: several ranks on one GPU, two hosts and four, one rank on a host and two.

`python tests/gpu_hosts.py` does the same where there is no pytest.
"""

import pytest

import gpu_hosts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.root
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", gpu_hosts.CHECKS)
def test_ranks_on_one_gpu_talk_over_limited_links(name):
    assert gpu_hosts.CHECKS[name]("cuda")  # what it saw; it raises where something is wrong


@pytest.mark.slow
@pytest.mark.parametrize("case", [gpu_hosts.Case(2, "1gbit", per_host=2, numel=1_000_000)], ids=str)
def test_the_checks_themselves_hold_over_gloo(case):
    assert gpu_hosts.check_all_reduce(case, "cpu")
    assert gpu_hosts.check_inside_a_host("cpu")
