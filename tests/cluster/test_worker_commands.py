import json
import sys

import pytest

from penstock.cluster import emulated_cluster
from penstock.cluster.building import run_command
from penstock.cluster.processes import Collected
from penstock.cluster.worker_commands import find_mpirun, first_failure, rank_output
from penstock.errors import ClusterError


def saying(text):
    return lambda argv: (0, text, "")


def why_no_mpi():
    try:
        find_mpirun(run_command)
    except ClusterError as error:
        return str(error)
    return ""


needs_mpirun = pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi() or "mpirun found")


def test_without_mpirun_the_package_that_brings_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"engine mpi needs Open MPI's mpirun and found none; `pip install"):
        find_mpirun(saying(""), beside=tmp_path)


@pytest.mark.parametrize("version", ["mpirun (Open MPI) 4.1.4", "HYDRA build details:", ""])
def test_an_mpirun_that_is_too_old_or_not_open_mpi_is_refused(tmp_path, version):
    (tmp_path / "mpirun").touch()
    with pytest.raises(ClusterError, match="wanted Open MPI 5 or newer"):
        find_mpirun(saying(version), beside=tmp_path)


def test_lines_of_mpirun_are_given_to_the_ranks_that_wrote_them():
    seen = Collected()
    take = rank_output(seen)
    take(0, "stdout", "[1,3]<stdout>: a [2] line\n")
    take(0, "stdout", "[1,0]<stderr>: \n")
    take(0, "stderr", "mpirun itself\n")
    take(0, "stderr", "[host:1] plm:ssh: Warning: setpgid(1,1) failed\n")
    assert seen.text(3) == "a [2] line\n"
    assert seen.text(0, "stderr") == "\nmpirun itself\n"


def test_the_first_noted_failure_counts(tmp_path):
    notes = tmp_path / "failures"
    assert first_failure(notes) is None
    notes.write_text("5 1\n143 0\n")
    assert first_failure(notes) == (5, 1)


@pytest.mark.root
@needs_mpirun
def test_mpirun_starts_ranks_on_every_host_with_torchruns_variables_too():
    code = "import json, os, socket; print(json.dumps(dict(os.environ) | {'HOST': socket.gethostname()}))"
    seen = Collected()
    with emulated_cluster(hosts=2, rate="1gbit") as cluster:
        assert cluster.run([sys.executable, "-c", code], engine="mpi", per_host=2, sink=seen).exit_code == 0
    workers = [json.loads(seen.text(rank)) for rank in range(4)]
    assert [worker["RANK"] for worker in workers] == ["0", "1", "2", "3"]
    assert [worker["GROUP_RANK"] for worker in workers] == ["0", "0", "1", "1"]
    assert {worker["WORLD_SIZE"] for worker in workers} == {"4"}
    assert {worker["MASTER_ADDR"] for worker in workers} == {cluster.layout.hosts[0].address}
    assert [worker["HOST"] for worker in workers] == [host.namespace for host in cluster.layout.hosts for _ in "ab"]


@pytest.mark.root
@needs_mpirun
def test_a_failing_rank_ends_the_others_and_gives_its_exit_code():
    with emulated_cluster(hosts=2, rate="none") as cluster:
        script = "[ $RANK = 1 ] && exit 5; sleep 60"
        outcome = cluster.run(["sh", "-c", script], engine="mpi", sink=Collected())
    assert (outcome.exit_code, outcome.failed_rank) == (5, 1)


@pytest.mark.root
@needs_mpirun
def test_mpi_messages_travel_over_the_limited_links():
    code = (
        "from mpi4py import MPI; import numpy, time\n"
        "c = MPI.COMM_WORLD; x = numpy.ones(1_250_000, dtype='u1'); c.Barrier(); t = time.perf_counter()\n"
        "c.Send(x, 1) if c.rank == 0 else c.Recv(x, 0)\n"
        "c.Barrier(); print(time.perf_counter() - t)\n"
    )
    pytest.importorskip("mpi4py")
    seen = Collected()
    with emulated_cluster(hosts=2, rate="100mbit") as cluster:
        assert cluster.run([sys.executable, "-c", code], engine="mpi", sink=seen).exit_code == 0
    assert float(seen.text(0)) > 0.08  # 1.25 MB at 100 Mb/s are 0.1 s, and more on a busy machine


@pytest.mark.root
def test_an_unknown_engine_is_refused():
    with (
        emulated_cluster(hosts=1, rate="none") as cluster,
        pytest.raises(ClusterError, match="wanted one of gloo, mpi"),
    ):
        cluster.run(["true"], engine="nccl")
