"""Small collectives between the ranks of a job, on numpy arrays."""

import numpy as np
import pytest

from adaptor.worlds import Fabrics, run_worlds, world_outcomes
from penstock.adaptor.world import choose_engine
from penstock.errors import MismatchError, PenstockError, PlanError, TransportError
from penstock.runtime.launch import Place, place_of


def values(rank: int, shape=(3, 4), dtype="float32"):
    return (np.arange(np.prod(shape), dtype=np.float64).reshape(shape) * (rank + 1) - 5).astype(dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "float16", "int8", "uint8"])
def test_sums_are_those_of_numpy_in_every_type(world_size, dtype):
    shapes = [(3, 4), (), (0, 2), (5,)]

    def rank(world):
        return world.all_reduce([np.asarray(values(world.rank, shape, dtype)) for shape in shapes], op="sum")

    with np.errstate(over="ignore"):
        wanted = [sum(values(rank, shape, dtype) for rank in range(world_size)) for shape in shapes]
    for found in run_worlds(world_size, rank):
        for each, want in zip(found, wanted, strict=True):
            assert each.dtype == dtype
            np.testing.assert_array_equal(each, want)


@pytest.mark.parametrize(
    ("op", "oracle"),
    [("average", np.mean), ("min", np.min), ("max", np.max), ("product", np.prod)],
)
def test_other_ways_to_reduce_are_those_of_numpy(op, oracle):
    wanted = oracle(np.stack([values(rank) for rank in range(3)]), axis=0)
    for (found,) in run_worlds(3, lambda world: world.all_reduce([values(world.rank)], op=op)):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_factors_are_applied_before_and_after():
    found = run_worlds(2, lambda world: world.all_reduce([values(world.rank)], "sum", prescale=0.5, postscale=3.0)[0])
    np.testing.assert_allclose(found[0], 1.5 * (values(0) + values(1)), rtol=1e-6)


def test_averages_of_integers_round_down():
    found = run_worlds(2, lambda world: world.all_reduce([np.array([1 + world.rank, -4 + world.rank])])[0])
    np.testing.assert_array_equal(found[0], [1, -4])


def test_what_a_caller_brings_is_left_as_it_is():
    def rank(world):
        mine = values(world.rank)
        world.all_reduce([mine], "sum")
        world.broadcast([mine], 1)
        return mine

    for index, found in enumerate(run_worlds(2, rank)):
        np.testing.assert_array_equal(found, values(index))


@pytest.mark.parametrize("root", [0, 2])
def test_a_broadcast_takes_every_type_from_its_root(root):
    def arrays(rank):
        return [values(rank, (2, 3), dtype) for dtype in ("float64", "uint8", "bool", "int64")] + [np.float32(rank)]

    for found in run_worlds(3, lambda world: world.broadcast(arrays(world.rank), root)):
        for each, want in zip(found, arrays(root), strict=True):
            assert each.dtype == want.dtype
            np.testing.assert_array_equal(each, want)


def test_rows_are_gathered_whatever_their_number():
    wanted = np.concatenate([values(rank, (rank, 4)) for rank in range(3)])
    for found in run_worlds(3, lambda world: world.all_gather(values(world.rank, (world.rank, 4)))):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda world: world.all_reduce([values(0, (2 + world.rank,))]), "rank 0 brings (2,) of float32, rank 1 (3,)"),
        (lambda world: world.all_reduce([values(0, (2,), ["float32", "int32"][world.rank])]), "rank 1 (2,) of int32"),
        (lambda world: world.all_reduce([values(0)] * (1 + world.rank)), "brings 1 tensors, rank 1 2"),
        (lambda world: world.broadcast([values(0, (2 + world.rank,))]), "broadcast from rank 0, tensor 0"),
        (lambda world: world.broadcast([values(0)], world.rank), "rank 0 calls broadcast from rank 0, rank 1 broadcas"),
        (lambda world: world.all_gather(values(0, (2, 2 + world.rank))), "rank 0 calls all-gather of rows of (2,)"),
        (lambda world: [world.barrier, lambda: world.all_reduce([values(0)])][world.rank](), "rank 0 calls a barrier"),
    ],
)
def test_ranks_that_bring_different_things_all_hear_it(call, complaint):
    for found in world_outcomes(2, call):
        assert isinstance(found, MismatchError)
        assert complaint in str(found)


def test_bad_arguments_are_refused():
    for bad in (lambda world: world.all_reduce([values(0)], "median"), lambda world: world.broadcast([values(0)], 2)):
        for found in world_outcomes(2, bad):
            assert isinstance(found, PlanError)
    (found,) = world_outcomes(1, lambda world: world.all_reduce([np.array(["text"])]))
    assert "wanted one of float32" in str(found)


def test_a_rank_that_died_is_named():
    fabrics = Fabrics(3)

    def rank(world):
        world.barrier()
        if world.rank == 2:
            fabrics.kill(2)
            return None
        return world.all_reduce([values(0)])

    for found in world_outcomes(3, rank, timeout_seconds=20, fabrics=fabrics)[:2]:
        assert isinstance(found, TransportError)
        assert "rank 2" in str(found)


MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


@pytest.mark.parametrize("environment", [MPIRUN, TORCHRUN, SRUN])
def test_all_launchers_say_the_same(environment):
    assert place_of(environment) == Place(3, 4, 1, 2)
    assert not place_of(environment).is_one_host


def test_without_a_launcher_a_process_is_alone():
    assert place_of({}) == Place(0, 1)
    assert choose_engine(None, {}, Place(0, 1)) == "memory"


@pytest.mark.parametrize(
    ("environment", "installed", "engine"),
    [
        (MPIRUN, ("torch", "mpi4py"), "mpi"),
        (MPIRUN, ("torch",), "gloo"),
        (TORCHRUN, ("torch", "mpi4py"), "gloo"),
        (TORCHRUN, ("mpi4py",), "mpi"),
    ],
)
def test_the_engine_is_what_launcher_and_packages_allow(monkeypatch, environment, installed, engine):
    monkeypatch.setattr("penstock.adaptor.world.find_spec", lambda name: name if name in installed else None)
    assert choose_engine(None, environment, place_of(environment)) == engine


def test_without_an_engine_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("penstock.adaptor.world.find_spec", lambda name: None)
    with pytest.raises(PenstockError, match=r"4 ranks.*penstock\[mpi\]"):
        choose_engine(None, TORCHRUN, place_of(TORCHRUN))
    with pytest.raises(PlanError, match="no engine called 'nccl'"):
        choose_engine("nccl", {}, Place(0, 1))


def test_objects_are_pickled_only_where_a_call_asks_for_objects():
    thing = Place(0, 1, 0, 1)
    assert run_worlds(2, lambda world: world.gather_objects((world.rank, thing))) == [[(0, thing), (1, thing)]] * 2
    for found in world_outcomes(2, lambda world: world.gather(thing)):
        assert isinstance(found, PlanError)
        assert str(found).startswith("a Place to tell other ranks; wanted numbers, strings, bytes")
