"""Compressed programs on a device; without a GPU in Triton's interpreter, where host memory is the device."""

import os
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton", reason="install penstock[gpu] to test codecs on a device")

from penstock.codecs.registry import make_codec  # noqa: E402
from penstock.runtime.device.coded import prepare_coded  # noqa: E402
from penstock.runtime.device.mirror import Mirror  # noqa: E402
from penstock.runtime.executor import WINDOW, prepare  # noqa: E402
from penstock.strategies import Options, build_compressed  # noqa: E402
from runtime.threads import run_ranks  # noqa: E402
from sparse_oracle import dyadic  # noqa: E402

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
PARTS = [0, 700, 700, 2900, 3000]
OPTIONS = Options(block_numel=1200, ranks_per_node=2)
EVERY_RANK = range(8)


def slow(*arguments):
    """Return a case that takes seconds in the interpreter."""
    return pytest.param(*arguments, marks=pytest.mark.slow)


class OneAtATime:
    """A codec's form whose kernels never run on two threads at once: Triton's interpreter is not made for that."""

    lock = threading.Lock()

    def __init__(self, form):
        self.form = form

    def begin(self, count):
        with self.lock:
            self.form.begin(count)

    def __getattr__(self, name):
        return lambda *arguments: Locked(getattr(self.form, name)(*arguments))


class Locked:
    def __init__(self, task):
        self.task, self.finish = task, task.finish

    def start(self):
        with OneAtATime.lock:
            self.task.start()


def run_steps(spec, strategy, gradients, ranks_on_device, parts=PARTS):
    """All-reduce every step's gradients; return each rank's results and residual."""
    world_size, numel = len(gradients[0]), parts[-1]
    noted = []

    def rank(transport):
        codec, on_device = make_codec(spec, seed=transport.rank), transport.rank in ranks_on_device
        program, batches = build_compressed(strategy, world_size, parts, OPTIONS)
        if on_device:
            form = codec.on_device(DEVICE, lambda: noted.append(transport.rank))
            ready = prepare_coded(program, transport, codec, OneAtATime(form), WINDOW, Mirror(DEVICE), batches)
        else:
            ready = prepare(program, transport, "float32", codec, batches=batches)
        place = DEVICE if on_device else "cpu"
        residual, data = torch.zeros(numel, device=place), torch.zeros(numel, device=place)
        results = []
        for call, step in enumerate(gradients):
            data.copy_(torch.from_numpy(step[transport.rank]))
            ready.run(data, call, 20.0, residual=residual)
            results.append(data.cpu().numpy().copy())
        return results, residual.cpu().numpy()

    return run_ranks(world_size, rank), noted


def test_ranks_on_a_device_and_one_on_the_host_understand_each_other_where_payloads_have_one_size():
    """A parameter server need not have a GPU because the ranks that train do."""
    gradients = dyadic(np.random.default_rng(3), (2, 3, PARTS[-1]))
    found, noted = run_steps("onebit", "parameter_server", gradients, (0, 1))
    for step in range(2):
        assert len({results[step].tobytes() for results, _ in found}) == 1
    applied, kept = sum(found[0][0]), sum(residual for _, residual in found)
    np.testing.assert_allclose(applied + kept, gradients.sum((0, 1)), atol=1e-3)
    assert not noted


@pytest.mark.parametrize(
    ("spec", "strategy", "world_size"),
    [
        ("topk(density=0.25)", "ring", 2),
        ("sparse(density=0.01)", "gtopk_doubling", 3),
        ("sparse(density=0.01)", "gtopk", 1),
        slow("topk(density=0.25)", "linear_pipeline", 3),
        slow("sparse(density=0.01)", "gtopk", 4),
        slow("sparse(density=0.01, value_bits=16)", "topk_allgather", 3),
    ],
)
def test_values_that_are_sent_as_they_are_give_the_bits_of_the_host(spec, strategy, world_size):
    gradients = dyadic(np.random.default_rng(world_size), (2, world_size, PARTS[-1]))
    there, noted = run_steps(spec, strategy, gradients, EVERY_RANK)
    here, _ = run_steps(spec, strategy, gradients, ())
    for (results, residual), (wanted, wanted_residual) in zip(there, here, strict=True):
        assert [one.tobytes() for one in results] == [one.tobytes() for one in wanted]
        assert residual.tobytes() == wanted_residual.tobytes()
    assert not noted


@pytest.mark.parametrize(
    ("spec", "strategy"),
    [("terngrad", "hierarchical"), slow("onebit", "parameter_server"), slow("onebit", "all_gather")],
)
def test_all_ranks_hold_the_same_bits_and_nothing_is_lost(spec, strategy):
    check_nothing_is_lost(spec, strategy, 3, 2)


def test_a_rank_that_is_alone_loses_nothing_either():
    check_nothing_is_lost("onebit", "ring", 1, 3)


def check_nothing_is_lost(spec, strategy, world_size, steps):
    gradients = np.random.default_rng(5).normal(size=(steps, world_size, PARTS[-1])).astype(np.float32)
    held, _ = run_steps(spec, strategy, gradients, EVERY_RANK)
    for step in zip(*(results for results, _ in held), strict=True):
        assert len({one.tobytes() for one in step}) == 1
    found = np.sum(held[0][0], axis=0) + np.sum([residual for _, residual in held], axis=0)
    np.testing.assert_allclose(found, gradients.sum((0, 1)), atol=1e-4)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("spec", "strategy"), [("onebit", "ring"), ("sparse(density=0.01)", "gtopk")])
def test_a_gradient_that_is_not_finite_becomes_nan_on_every_rank_for_its_tensor(spec, strategy, world_size):
    gradients = np.ones((1, world_size, PARTS[-1]), np.float32)
    gradients[0, -1, 1000] = np.inf
    held, noted = run_steps(spec, strategy, gradients, EVERY_RANK)
    for (result,), _ in held:
        assert np.isnan(result[1000])  # and the rest of its piece
        assert np.isfinite(result[:700]).all()
        assert np.isfinite(result[2900:]).all()
    assert set(noted) == set(range(world_size))
