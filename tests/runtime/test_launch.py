import pytest

from penstock.errors import PenstockError
from penstock.runtime.launch import first_host, torchrun_variables

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "123456",
}


def test_torchrun_needs_nothing_more():
    assert torchrun_variables({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host"} | SRUN) == {}


def test_gloo_without_a_launcher_names_the_variable_that_is_missing(monkeypatch):
    pytest.importorskip("torch", reason="gloo is torch's")
    from penstock.runtime.connect import connected

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"), connected("gloo"):
        pass


def test_a_process_started_alone_stays_alone():
    assert torchrun_variables({"HOME": "/root", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) == {}


def test_srun_names_the_first_host_and_a_port_of_the_job():
    assert torchrun_variables(SRUN) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "23456",
    }


def test_mpirun_on_one_host_meets_on_loopback():
    found = torchrun_variables(MPIRUN)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["MASTER_ADDR"]) == (
        "3",
        "4",
        "1",
        "127.0.0.1",
    )
    assert found["MASTER_PORT"] == torchrun_variables(MPIRUN | {"OMPI_COMM_WORLD_RANK": "0"})["MASTER_PORT"]


def test_mpirun_on_several_hosts_must_say_where_rank_0_is():
    several = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(PenstockError, match="several hosts; say where rank 0 is"):
        torchrun_variables(several)
    assert torchrun_variables(several | {"MASTER_ADDR": "head"})["MASTER_ADDR"] == "head"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("n[1-4]", "n1"), ("n[03,05-9]x,m", "n03x"), ("rack1-n[2]", "rack1-n2")],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host
