"""Buckets go in and averages come out, on one thread and in one order, without any framework."""

import gc
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import NonFiniteError, PlanError
from penstock.exchange.compression import Compression, make_scheme
from penstock.exchange.exchange import Exchange
from penstock.exchange.momentum import Momentum
from penstock.exchange.parameter_state import Memory
from penstock.network import Network
from penstock.plan import Bucket, Plan, Route
from penstock.runtime import binding, executor, handshake, request
from penstock.runtime.communicator import Communicator
from runtime.threads import run_ranks

EXACT = "topk(density=0.25)"  # sends values as they are
SIZES = {"a": 37, "b": 600, "c": 5}


def gradients(rank: int, step: int, names: str) -> np.ndarray:
    """Dyadic values, so that sums of a few hundred of them are exact."""
    generator = np.random.default_rng([rank, step, *map(ord, names)])
    return generator.integers(-512, 513, sum(SIZES[name] for name in names)).astype(np.float32) / 64


def train(transport, memory: Memory, plan: Plan | None = None, steps: int = 4, buckets=("ab", "c"), **options):
    """Exchange some buckets for some steps; return each bucket's averages and the exchange."""
    exchange = Exchange(Communicator(transport, timeout_seconds=120), memory=memory, **options)
    if plan is not None:
        exchange.follow(plan)
    made = [exchange.bucket(list(names), [SIZES[name] for name in names]) for names in buckets]
    found = []
    for step in range(steps):
        exchange.begin()
        values = [gradients(transport.rank, step, names) for names in buckets]
        for handle in [exchange.start(bucket, each) for bucket, each in zip(made, values, strict=True)]:
            exchange.wait(handle)
        found.append(values)
    exchange.close()
    return found, exchange


@pytest.mark.parametrize("codec", [EXACT, "onebit", "sparse(density=0.1)"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_that_ranks_give_is_applied_or_owed_and_all_get_the_same(codec: str, world_size: int) -> None:
    ranks = run_ranks(world_size, lambda transport: train(transport, Memory(make_scheme(codec))))
    for names, index in (("ab", 0), ("c", 1)):
        for step in range(4):
            for found, _ in ranks[1:]:
                np.testing.assert_array_equal(found[step][index], ranks[0][0][step][index])
        applied = sum(each[index].astype(np.float64) for each in ranks[0][0])
        given = sum(gradients(rank, step, names).astype(np.float64) for rank in range(world_size) for step in range(4))
        owed = sum(
            np.concatenate([exchange.state_dict()["memories"]["residual"][name] for name in names])
            for _, exchange in ranks
        )
        np.testing.assert_allclose(applied + owed, given / world_size, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "strategy", ["ring", "binary_tree", "parameter_server", "recursive_doubling", "halving_doubling"]
)
@pytest.mark.parametrize("codec", ["onebit", "terngrad", "sparse(density=0.1)", None])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_that_are_read_where_they_are_give_the_same_bits_and_stay(world_size, codec, strategy, monkeypatch):
    """Read there by codecs that put feedback off, where ranks are a power of two and each piece is first encoded."""
    copied, names, sizes = [], ("a", "b", "c"), list(SIZES.values())
    copy = binding.copy_sources
    monkeypatch.setattr(executor, "copy_sources", lambda *each: (copied.append(strategy), copy(*each)))
    plan = Plan("model", world_size, "exact", (Bucket(names, 4 * sum(sizes), strategy, codec),))

    def rank(transport, elsewhere):
        memory = Memory(make_scheme(codec))
        exchange = Exchange(Communicator(transport, timeout_seconds=120), memory=memory)
        exchange.follow(plan)
        bucket, found = exchange.bucket(names, sizes), []
        for step in range(4):
            given = np.random.default_rng([transport.rank, step]).standard_normal(sum(sizes), np.float32)
            values = np.full_like(given, 1e9) if elsewhere else given.copy()
            sources = [each.copy() for each in np.split(given, np.cumsum(sizes)[:-1])] if elsewhere else ()
            exchange.begin()
            exchange.wait(exchange.start(bucket, values, sources=sources))
            found.append(values.tobytes())
            assert not elsewhere or np.concatenate(sources).tobytes() == given.tobytes()
        exchange.close()
        return found

    wanted = run_ranks(world_size, lambda transport: rank(transport, False))
    assert run_ranks(world_size, lambda transport: rank(transport, True)) == wanted
    if (codec, strategy, world_size) == ("onebit", "ring", 2):
        assert not copied


@pytest.mark.parametrize("codec", ["onebit", "sparse(density=0.1)", "terngrad"])
def test_one_worker_keeps_its_gradients_and_adds_what_more_workers_have_not_sent(codec: str) -> None:
    two = run_ranks(2, lambda transport: train(transport, Memory(make_scheme(codec))))
    states = [exchange.state_dict() for _, exchange in two]
    kept = sum(each["memories"]["residual"]["c"] for each in states)

    def rank(transport):
        memory = Memory(make_scheme(codec))
        memory.load_state_dicts(states, 0, 1)
        return train(transport, memory, steps=2, buckets=("c",))

    ((found, exchange),) = run_ranks(1, rank)
    np.testing.assert_allclose(found[0][0], gradients(0, 0, "c") + kept, rtol=1e-6)
    np.testing.assert_array_equal(found[1][0], gradients(0, 1, "c"))
    assert exchange.traffic().sent_nbytes == 0


def test_every_tensor_of_a_bucket_travels_by_its_own_route() -> None:
    buckets = (Bucket(("a",), 4 * 37, "ring", EXACT), Bucket(("b",), 2400, "ring"), Bucket(("c",), 20, "native"))
    plan = Plan("model", 2, "exact", buckets)
    ranks = run_ranks(2, lambda transport: train(transport, Memory(make_scheme(EXACT)), plan, 1, ("abc",)))
    used = {each.route: each.nbytes for each in ranks[0][1].routes_used()}
    assert used == {f"ring+{EXACT}": 4 * 37, "ring": 2400, "native": 20}
    mean = (gradients(0, 0, "abc") + gradients(1, 0, "abc")) / 2
    np.testing.assert_array_equal(ranks[0][0][0][0][37:], mean[37:])


def test_a_linear_pipeline_takes_the_block_that_is_best_on_the_measured_network(monkeypatch) -> None:
    """Messages of a rank in the middle of three: 2 out for every block of 37 + 600 elements."""
    monkeypatch.setattr(request, "SMALLEST_BLOCK", 1)
    monkeypatch.setattr(handshake, "shared_cores", lambda claims: 0)  # as on several hosts
    plan = Plan("model", 3, "exact", (Bucket(("a", "b"), 4 * 637, "linear_pipeline"),))

    def rank(transport, network):
        exchange = Exchange(Communicator(transport, timeout_seconds=120))
        exchange.follow(plan, network)
        values = gradients(transport.rank, 0, "ab")
        exchange.begin()
        exchange.wait(exchange.start(exchange.bucket(["a", "b"], [37, 600]), values))
        (prepared,) = exchange.communicator._prepared.values()
        exchange.close()
        return values, sum(one.op.value == "send" for one in prepared.part.instructions)

    mean = sum(gradients(rank, 0, "ab") for rank in range(3)) / 3
    for network, blocks in ((None, 1), (Network(3, 1e-6, 2e-8, 0.0), 11)):  # b = sqrt(n alpha / 2 beta) = 252 B
        ranks = run_ranks(3, lambda transport, network=network: rank(transport, network))
        np.testing.assert_allclose(ranks[1][0], mean, rtol=0, atol=1e-6)
        assert ranks[1][1] == 2 * blocks


def test_a_bucket_of_before_the_plan_is_refused() -> None:
    def rank(transport):
        exchange = Exchange(Communicator(transport))
        bucket = exchange.bucket(["a"], [4])
        exchange.follow(Plan("model", 1, "exact", (Bucket(("a",), 16, "ring"),)))
        exchange.begin()
        exchange.start(bucket, np.zeros(4, np.float32))

    with pytest.raises(PlanError, match="made before the plan changed"):
        run_ranks(1, rank)


@pytest.mark.parametrize("codec", ["onebit", EXACT])
def test_a_new_plan_lets_the_residuals_of_old_buckets_go(codec: str) -> None:
    def rank(transport):
        exchange = Exchange(Communicator(transport, timeout_seconds=120), Compression(codec))
        kept = []
        for names in ("abc", "ab", "abc"):  # in one bucket, then without the last, then again
            sizes = [SIZES[name] for name in names]
            exchange.follow(Plan("model", 2, "exact", (Bucket(tuple(names), 4 * sum(sizes), "ring", codec),)))
            bucket = exchange.bucket(list(names), sizes)
            exchange.begin()
            exchange.wait(exchange.start(bucket, gradients(transport.rank, 0, names)))
            kept.append(weakref.ref(exchange.memory.residuals.deferred(names, sizes).memory))
            del bucket
        gc.collect()
        exchange.close()
        return [each() is None for each in kept]

    assert run_ranks(2, rank) == [[True, True, False]] * 2


def test_what_an_engine_cannot_sum_by_itself_goes_by_ring() -> None:
    exchange = run_ranks(
        1, lambda transport: Exchange(Communicator(transport), route=Route("native"), without_native=["bfloat16"])
    )[0]
    assert [exchange.bucket(["a"], [4], kind).is_native for kind in ("bfloat16", "float32")] == [False, True]


def test_a_model_that_is_clipped_sends_nothing_before_all_gradients_are_there() -> None:
    def rank(transport):
        memory = Memory(make_scheme(None, momentum=Momentum(clip=1.0)))
        exchange = Exchange(Communicator(transport, timeout_seconds=120), memory=memory, route=Route("ring"))
        first, second = exchange.bucket(["a"], [1]), exchange.bucket(["b"], [1])
        exchange.begin()
        three, four = np.full(1, 3.0, np.float32), np.full(1, 4.0, np.float32)
        handles = [exchange.start(first, three), exchange.start(second, four)]
        assert [handle.future for handle in handles] == [None, None]
        for handle in handles:
            exchange.wait(handle)
        return three[0], four[0]

    np.testing.assert_allclose(run_ranks(1, rank), [(0.6, 0.8)], rtol=1e-6)


def test_a_gradient_that_is_not_finite_is_raised_on_every_rank_until_a_state_is_loaded() -> None:
    def rank(transport):
        exchange = Exchange(Communicator(transport, timeout_seconds=120), Compression("onebit"))
        bucket, before = exchange.bucket(["a"], [37]), exchange.state_dict()
        told = []
        for step in range(3):
            exchange.begin()
            values = np.full(37, np.nan if (step, transport.rank) == (0, 1) else 1.0, np.float32)
            try:
                exchange.wait(exchange.start(bucket, values))
                told.append("")
            except NonFiniteError as error:
                told.append(str(error)[:20])
            if step == 1:
                exchange.load_state_dict([{**before, "rank": each} for each in range(2)])
        return told

    assert run_ranks(2, rank) == [["the gradient of 'a' ", "the gradient of 'a' ", ""]] * 2


def test_a_sparse_gradient_that_is_not_finite_undoes_its_own_iteration_and_not_the_one_before() -> None:
    """It travels beside the exchange, and may be there before the first bucket of its iteration."""

    def rank(transport):
        memory = Memory(make_scheme("onebit"), on_nonfinite="skip")
        exchange = Exchange(Communicator(transport, timeout_seconds=120), memory=memory, route=Route("ring", "onebit"))
        bucket, owed = exchange.bucket(["b"], [600]), []
        for step in range(2):
            exchange.begin()
            if step == 1:
                exchange.note_nonfinite()
            exchange.wait(exchange.start(bucket, gradients(transport.rank, step, "b")))
            owed.append(exchange.state_dict()["memories"]["residual"]["b"])
        exchange.close()
        return owed

    for first, second in run_ranks(2, rank):
        assert first.any()
        np.testing.assert_array_equal(second, first)


def test_a_first_bucket_that_fails_before_its_iteration_begins_fails_the_others_too() -> None:
    def rank(transport):
        exchange = Exchange(Communicator(transport, timeout_seconds=120))
        buckets = [exchange.bucket([name], [SIZES[name]]) for name in "ab"]
        exchange.begin()

        def around(_: int):
            raise RuntimeError("the device is lost")

        first = exchange.start(buckets[0], gradients(0, 0, "a"), around=around)
        second = exchange.start(buckets[1], gradients(0, 0, "b"))
        assert second.future is not None
        second.future.result(timeout=60)  # it does not wait for a beginning that never comes
        for handle in (first, second):
            with pytest.raises(RuntimeError, match="the device is lost"):
                exchange.wait(handle)
        exchange.close()

    run_ranks(1, rank)


def test_a_run_goes_on_from_its_states_as_if_it_had_not_ended() -> None:
    def rank(transport):
        whole, _ = train(transport, Memory(make_scheme("onebit")), steps=6)
        _, first = train(transport, Memory(make_scheme("onebit")), steps=3)
        return whole, first.state_dict()

    whole = run_ranks(2, rank)
    states = [state for _, state in whole]

    def resumed(transport):
        memory = Memory(make_scheme("onebit"))
        memory.load_state_dicts(states, transport.rank, 2)
        exchange = Exchange(Communicator(transport, timeout_seconds=120), memory=memory)
        buckets = [exchange.bucket(list(names), [SIZES[name] for name in names]) for names in ("ab", "c")]
        found = []
        for step in range(3, 6):
            exchange.begin()
            values = [gradients(transport.rank, step, names) for names in ("ab", "c")]
            for bucket, each in zip(buckets, values, strict=True):
                exchange.wait(exchange.start(bucket, each))
            found.append(values)
        return found

    for (found, _), again in zip(whole, run_ranks(2, resumed), strict=True):
        for one, other in zip(found[3:], again, strict=True):
            for expected, value in zip(one, other, strict=True):
                np.testing.assert_array_equal(value, expected)


CASES = {
    "onebit": {"codec": "onebit"},
    "momentum": {"codec": "gtopk", "density": 0.1, "momentum": Momentum(0.9)},
    "nesterov": {"codec": "gtopk", "density": 0.1, "momentum": Momentum(0.9, nesterov=True)},
    "small tensors": {"codec": "onebit", "dense_below": 50},
    "dense momentum": {"codec": None, "momentum": Momentum(0.5)},
    "warm-up": {"codec": "gtopk", "density": 0.01, "warmup_spec": [0.5, 0.1]},
}


@pytest.mark.parametrize("case", CASES)
def test_numpy_and_torch_buffers_give_the_same_bits(case: str) -> None:
    torch = pytest.importorskip("torch", reason="compares with torch's buffers")
    from penstock.torch.checkpoint import TorchMemory

    def rank(transport):
        results = []
        for make in (Memory, TorchMemory):
            memory = make(make_scheme(**CASES[case]), on_nonfinite="skip")
            exchange = Exchange(Communicator(transport, timeout_seconds=120), memory=memory)
            bucket, found = exchange.bucket(list("abc"), list(SIZES.values())), []
            for step in range(5):
                exchange.begin()
                values = gradients(transport.rank, step, "abc") / 3
                if step == 2 and transport.rank == 1:
                    values[40] = np.inf  # this step is skipped
                exchange.wait(exchange.start(bucket, torch.from_numpy(values) if make is TorchMemory else values))
                found.append(values.tobytes())
            state = exchange.state_dict()["memories"]
            found += [np.asarray(value).tobytes() for kept in state.values() for value in kept.values()]
            results.append(found)
        return results

    for plain, tensors in run_ranks(2, rank):
        assert plain == tensors


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # any import of torch now fails
import numpy as np
from penstock.exchange.compression import Compression
from penstock.exchange.exchange import Exchange
from penstock.runtime.communicator import Communicator
{transport}
def run(transport):
    exchange = Exchange(Communicator(transport), Compression("onebit"))
    bucket = exchange.bucket(["weight"], [1000])
    for step in range(3):
        exchange.begin()
        values = np.random.default_rng([transport.rank, step]).standard_normal(1000).astype(np.float32)
        exchange.wait(exchange.start(bucket, values))
    exchange.close()
    return values.tobytes().hex()[:64], exchange.traffic().sent_nbytes
{end}
"""
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
LAUNCH = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", "PYTHONPATH"]
MPI = "from penstock.runtime.transport.mpi import MpiTransport"
THREADS = f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\nfrom runtime.threads import run_ranks"


def said(command: list[str], transport: str, end: str) -> list[str]:
    code = WITHOUT_TORCH.format(transport=transport, end=end)
    command = [*command, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun on PATH (pip install penstock[mpi])")
def test_it_runs_without_torch_and_over_mpi_with_the_same_bits() -> None:
    in_threads = said([], THREADS, "for each in run_ranks(2, run): print(*each)")
    assert len(set(in_threads)) == 2  # a line that both ranks say, and an empty one
    assert said(LAUNCH, MPI, "print(*run(MpiTransport()))") == in_threads
