"""Each check of the doctor, told what to see."""

from pathlib import Path

import pytest

from penstock.cluster.gpus import SharedGpu
from penstock.doctor import State, broken, checks, missing, works
from penstock.doctor import checks as examination
from penstock.doctor.checks import (
    PACKAGES,
    check_cache,
    check_cores,
    check_engines,
    check_gpus,
    check_package,
    check_packages,
    check_python,
    guarded,
    probe,
    usable_engines,
)
from penstock.errors import ClusterError

TORCH = next(package for package in PACKAGES if package.name == "torch")
NUMPY = PACKAGES[0]


def test_a_package_that_is_new_enough_works():
    assert check_package(TORCH, "2.13.0+cpu") == works("torch", "2.13.0+cpu")
    assert check_package(TORCH, "2.11").state is State.WORKS


def test_an_optional_package_that_is_not_there_is_missing_and_says_how_to_get_it():
    assert check_package(TORCH, None) == missing(
        "torch", "not installed; needed for training, gloo and NCCL", "pip install 'penstock[torch]'"
    )


def test_without_a_required_package_nothing_works():
    assert check_package(NUMPY, None).state is State.BROKEN


@pytest.mark.parametrize("version", ["2.9.1", "1.13", "2.10.9+cu128"])
def test_versions_are_compared_as_numbers(version):
    found = check_package(TORCH, version)
    assert found.state is State.BROKEN
    assert found.remedy == "pip install --upgrade 'torch>=2.11'"


def test_an_old_python_is_told_so():
    assert check_python((3, 10)).state is State.BROKEN
    assert check_python((3, 12)).state is State.WORKS


def test_every_package_is_looked_at():
    names = [finding.name for finding in check_packages(lambda name: None)]
    assert names == ["Python", "penstock", *(package.name for package in PACKAGES)]


def test_one_core_is_too_few_to_measure_speed():
    assert check_cores(1, 8).state is State.MISSING
    assert check_cores(2, 8) == works("cores", "2 of 8 usable by this process")


def test_gpus_are_those_that_torch_sees():
    assert check_gpus(lambda code: (True, "NVIDIA H200")) == works("GPUs", "NVIDIA H200")
    assert check_gpus(lambda code: (True, "")).found == "torch sees none"
    assert check_gpus(lambda code: (False, "ImportError: libcudart")).found.endswith("ImportError: libcudart")


def test_a_cache_that_cannot_be_written_is_missing(tmp_path):
    (tmp_path / "file").write_text("")
    found = check_cache(tmp_path / "file" / "cache")
    assert found.state is State.MISSING
    assert "make " in found.remedy
    assert check_cache(tmp_path / "new").state is State.WORKS


def engines(torch, mpi=(True, "Open MPI v5"), mpirun=lambda: "/bin/mpirun"):
    return {f.name: f for f in check_engines(lambda code: mpi if "mpi4py" in code else torch, mpirun)}


def test_engines_of_a_cpu_build_of_torch():
    found = engines((True, "1 0\n0"))
    assert [found[name].state for name in ("gloo", "NCCL", "MPI")] == [State.WORKS, State.MISSING, State.WORKS]
    assert found["NCCL"].found == "torch was built without it"
    assert found["MPI"].found == "Open MPI v5, /bin/mpirun"


def test_nccl_wants_a_gpu():
    assert engines((True, "1 1\n0\n"))["NCCL"].found == "in torch, but there is no GPU"
    assert engines((True, "1 1\n8\n2.27.3"))["NCCL"] == works("NCCL", "2.27.3, 8 GPU(s)")


def test_without_torch_its_engines_are_missing_and_with_a_broken_one_they_are_broken():
    assert engines((False, "ModuleNotFoundError: No module named 'torch'"))["gloo"].state is State.MISSING
    assert engines((False, "ImportError: libtorch.so"))["gloo"].state is State.BROKEN


def test_mpi_without_mpirun_is_broken():
    def none():
        raise ClusterError("found none")

    found = engines((True, "1 0\n0"), mpirun=none)["MPI"]
    assert found.state is State.BROKEN
    assert found.remedy == "pip install 'penstock[mpi]'"
    assert engines((True, "1 0\n0"), (False, "No module named 'mpi4py'"))["MPI"].state is State.MISSING


def test_emulated_hosts_want_root(monkeypatch):
    monkeypatch.setattr(checks.os, "geteuid", lambda: 1000)
    (found,) = checks.check_hosts()
    assert found.state is State.MISSING
    assert "need root" in found.found
    assert "loopback" in found.remedy


HERE = [works("NCCL", "2.28.9, 1 GPU(s)"), works("emulated hosts", "built")]


def gpu_hosts(monkeypatch, findings, service=None):
    """Return what is found of GPU hosts, with a service that was started or not; and whether it was tried."""
    asked = []
    monkeypatch.setattr(checks, "try_hosts", lambda gpus: asked.append(gpus) or service)
    (found,) = checks.check_gpu_hosts(findings)
    return found, asked


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        (missing("NCCL", "in torch, but there is no GPU", ""), "NCCL: in torch, but there is no GPU"),
        (missing("emulated hosts", "need root", ""), "emulated hosts: need root"),
    ],
)
def test_gpu_hosts_want_nccl_with_a_gpu_and_emulated_hosts(monkeypatch, lacking, reason):
    findings = [finding for finding in HERE if finding.name != lacking.name]
    found, asked = gpu_hosts(monkeypatch, [*findings, lacking])
    assert (found.state, found.found) == (State.MISSING, reason)
    assert "--gpus shared" in found.remedy
    assert asked == []  # no service is started for a GPU that is not there
    assert gpu_hosts(monkeypatch, findings)[0].found == f"{lacking.name}: could not be looked at"


def test_with_a_gpu_the_multi_process_service_is_tried(monkeypatch):
    found, asked = gpu_hosts(monkeypatch, HERE, SharedGpu(Path("/run")))
    assert found.state is State.WORKS
    assert found.found.startswith("NCCL 2.28.9, 1 GPU(s); ")
    assert asked == ["shared"]
    found, _ = gpu_hosts(monkeypatch, HERE, SharedGpu(None, "it does not run"))
    assert (found.state, found.found) == (State.MISSING, "NCCL 2.28.9, 1 GPU(s); it does not run")
    assert found.remedy.startswith("they work, slowly")


def test_a_check_that_fails_itself_is_a_finding():
    def fails():
        raise ZeroDivisionError("oops")

    (found,) = guarded("machine", fails)
    assert found == broken("machine", "ZeroDivisionError: oops", "this is a mistake in penstock; please report it")


def test_only_engines_that_work_are_tried():
    assert usable_engines([works("gloo", ""), missing("MPI", "", ""), missing("NCCL", "", "")]) == ["gloo"]
    assert usable_engines([broken("gloo", "", ""), works("MPI", "")]) == ["mpi"]


def test_the_examination_runs_every_check_in_order(monkeypatch):
    told = []
    checks = {name: (lambda name=name: [works(name, "")]) for name in ("one", "two")}
    monkeypatch.setattr(examination, "CHECKS", checks)
    assert [f.name for f in examination.examine(smoke_test=False, done=told.append)] == ["one", "two", "GPU hosts"]
    assert told == ["one", "two"]


def test_a_probe_returns_what_was_printed_or_the_last_complaint():
    assert probe("print(3)") == (True, "3")
    assert probe("import nothing_of_that_name") == (
        False, "ModuleNotFoundError: No module named 'nothing_of_that_name'",
    )  # fmt: skip
    ran, said = probe("import os; os.kill(os.getpid(), 9)")
    assert not ran
    assert said == "ended with exit code -9 and said nothing"
