"""Sharded training by four ranks on two emulated hosts; `python tests/fsdp_hosts.py` does it without pytest."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import fsdp_hosts  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module", params=[pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu]), "cpu"])
def found(request):
    """What is wrong in each check, all of them by one set of processes."""
    return fsdp_hosts.run_checks(request.param)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", fsdp_hosts.CHECKS)
def test_four_ranks_on_two_hosts_train_as_torch_s_own_hsdp_does(found, name):
    assert found[name] == ""


@pytest.mark.parametrize(
    ("last", "theirs", "wrong"),
    [
        (1.0, 1.0, ""),
        (1.0, 2.0, "ranks have different weights"),
        (np.nan, np.nan, "weights are not finite"),
        (np.inf, 1.0, "ranks have different weights, weights are not finite"),
    ],
)
def test_weights_are_wrong_that_differ_or_are_not_finite(monkeypatch, last, theirs, wrong):
    digests = []
    monkeypatch.setattr(fsdp_hosts, "gathered", lambda digest: digests.append(digest) or digests)
    fsdp_hosts.wrong_weights([np.zeros(3), np.array([theirs])])
    assert fsdp_hosts.wrong_weights([np.zeros(3), np.array([last])]) == wrong


def test_what_was_found_is_kept_without_folders_of_this_machine(monkeypatch, tmp_path):
    out = str(tmp_path / "checks.json")
    monkeypatch.setattr("sys.argv", ["tests/fsdp_hosts.py", "--cpu", "--json", out])
    fsdp_hosts.write(out, "cpu", {"one": "", "other": "weights are not finite"})
    record = json.loads((tmp_path / "checks.json").read_text())
    assert record["command"] == "python tests/fsdp_hosts.py --cpu --json OUT.json"
    assert [(row["check"], row["wrong"]) for row in record["rows"]] == [
        ("one", ""),
        ("other", "weights are not finite"),
    ]
