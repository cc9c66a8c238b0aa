"""What is owed comes through skipped steps, changed scales, 16 bits, failures and other options after a restart."""

import numpy as np
import pytest
import torch

from exchange.parcels import average as average_by
from penstock.errors import CodecError, NonFiniteError, PlanError
from penstock.exchange.averaging import KEPT_CODECS, Averaging
from penstock.exchange.compression import make_scheme
from penstock.exchange.momentum import Momentum
from penstock.exchange.state import FORMAT
from penstock.plan import Route
from penstock.runtime.communicator import Communicator
from penstock.runtime.transport.memory import Fabric
from penstock.torch.checkpoint import TorchMemory

EXACT = "sparse(density=0.25)"  # sends values as they are
GRADIENT = torch.arange(-32, 32) / 8  # dyadic, so that sums are exact
NUMEL = len(GRADIENT)


class Scale:
    """A gradient scaler that says what it is told to."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


def one_rank(memory: TorchMemory) -> Averaging:
    communicator = Communicator(Fabric(1).transport(0))
    return Averaging(communicator, memory, leaves_out=False)


def average(exchange: Averaging, values: torch.Tensor, codec: str | None) -> torch.Tensor:
    return average_by(exchange, values, Route("ring", codec))


def owed(memory: TorchMemory) -> np.ndarray:
    return memory.residuals.values().get("weight", np.zeros(NUMEL, np.float32))


def state(debt: torch.Tensor, scale: float = 1.0) -> dict:
    memories = {"residual": {"weight": debt}, "velocity": {}}
    return {"format": FORMAT, "rank": 0, "world_size": 1, "memories": memories, "iterations": 3, "scale": scale}


@pytest.mark.parametrize(
    ("strategy", "codec"), [("gtopk", EXACT), ("gtopk", "published(density=0.25)"), ("ring", "onebit")]
)
def test_a_step_that_is_skipped_leaves_what_was_owed(strategy: str, codec: str) -> None:
    memory = TorchMemory(make_scheme(codec), on_nonfinite="skip")
    exchange, route = one_rank(memory), Route(strategy, codec)
    average_by(exchange, GRADIENT.clone(), route)
    before = owed(memory)
    for _ in range(2):
        spoilt = torch.full((NUMEL,), torch.nan)
        average_by(exchange, spoilt, route)
        assert spoilt.isnan().all()
    after = memory.state_dict(0, 1)["memories"]["residual"]["weight"].numpy()
    assert before.any()
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", [EXACT, "onebit"])
def test_what_16_bits_do_not_hold_of_an_average_is_owed(codec: str, dtype: torch.dtype) -> None:
    memory = TorchMemory(make_scheme(codec))
    exchange, applied, steps = one_rank(memory), torch.zeros(NUMEL, dtype=torch.float64), 5
    gradient = (GRADIENT * 1.0625).to(dtype)  # products of few bits
    for _ in range(steps):
        applied += average(exchange, gradient.clone(), codec).double()
    tolerance = 0 if codec == EXACT else 1e-5  # onebit's means are rounded to float32
    np.testing.assert_allclose(
        applied.numpy() + owed(memory), steps * gradient.double().numpy(), rtol=0, atol=tolerance
    )


def test_a_state_of_other_sizes_is_refused_also_where_it_would_be_paid_dense() -> None:
    memory = TorchMemory(make_scheme(None))
    memory.load_state_dicts([state(torch.ones(NUMEL + 1))], 0, 1)
    with pytest.raises(PlanError, match="residual of 'weight' has 65 elements, its parameter 64; load the state of"):
        average(one_rank(memory), GRADIENT.clone(), None)


def test_what_is_no_gradient_scaler_is_refused() -> None:
    with pytest.raises(CodecError, match="grad_scaler is 5; wanted torch's GradScaler"):
        TorchMemory(scaler=5)


def test_a_skipped_step_gives_back_a_debt_that_travelled_dense() -> None:
    memory = TorchMemory(make_scheme(None), on_nonfinite="skip")
    memory.load_state_dicts([state(torch.full((NUMEL,), 2.0))], 0, 1)
    exchange = one_rank(memory)
    average(exchange, torch.full((NUMEL,), torch.inf), None)
    np.testing.assert_array_equal(average(exchange, GRADIENT.clone(), None), GRADIENT + 2)


def test_a_debt_of_a_tensor_that_has_become_small_is_paid() -> None:
    memory = TorchMemory(make_scheme(EXACT, dense_below=NUMEL + 1))
    memory.load_state_dicts([state(GRADIENT)], 0, 1)
    exchange = one_rank(memory)
    applied = sum(average(exchange, torch.ones(NUMEL), EXACT) for _ in range(5))
    assert not owed(memory).any()
    np.testing.assert_array_equal(applied, 5 + GRADIENT)


@pytest.mark.parametrize("scaler", [None, Scale(4.0)])
def test_a_debt_saved_at_one_scale_is_applied_at_another(scaler: Scale | None) -> None:
    memory = TorchMemory(make_scheme(None), scaler=scaler)
    memory.load_state_dicts([state(torch.full((NUMEL,), 1024.0), scale=1024.0)], 0, 1)
    scale = scaler.get_scale() if scaler else 1.0
    np.testing.assert_array_equal(average(one_rank(memory), torch.zeros(NUMEL), None), scale)


def test_a_sum_that_16_bits_cannot_hold_is_a_skipped_step() -> None:
    memory = TorchMemory(make_scheme(EXACT), on_nonfinite="skip")
    exchange, half = one_rank(memory), torch.full((NUMEL,), 40000.0, dtype=torch.float16)
    average(exchange, half.clone(), EXACT)
    before = owed(memory)
    assert average(exchange, half.clone(), EXACT).isinf().any()  # 80000 of what waited
    np.testing.assert_array_equal(memory.state_dict(0, 1)["memories"]["residual"]["weight"], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("codec", [None, "sparse(density=1)"])
def test_gradients_of_16_bits_have_momentum_too(dtype: torch.dtype, codec: str | None) -> None:
    memory = TorchMemory(make_scheme(codec, momentum=Momentum(0.5, masking=False)))
    exchange = one_rank(memory)
    found = [average(exchange, torch.ones(4, dtype=dtype), codec)[0].item() for _ in range(3)]
    assert found == [1.0, 1.5, 1.75]


def test_momentum_of_64_bits_is_refused() -> None:
    exchange = one_rank(TorchMemory(make_scheme(None, momentum=Momentum(0.5))))
    with pytest.raises(CodecError, match=r"momentum of float64 gradients; .* leave momentum to the optimizer"):
        average(exchange, torch.ones(4, dtype=torch.float64), None)


def test_after_a_gradient_that_is_not_finite_only_a_checkpoint_helps() -> None:
    memory = TorchMemory(make_scheme(EXACT))
    exchange = one_rank(memory)
    with pytest.raises(NonFiniteError, match="gradient of 'weight'"):
        average(exchange, torch.full((NUMEL,), torch.nan), EXACT)
    for go_on in (lambda: memory.state_dict(0, 1), lambda: average(exchange, GRADIENT.clone(), EXACT)):
        with pytest.raises(NonFiniteError, match="load the exchange state of the last checkpoint"):
            go_on()
    memory.load_state_dicts([state(torch.zeros(NUMEL))], 0, 1)
    assert average(exchange, GRADIENT.clone(), EXACT).any()


def test_warm_up_counts_iterations_that_compress() -> None:
    memory = TorchMemory(make_scheme(EXACT, momentum=Momentum(0.5)))
    exchange = one_rank(memory)
    for codec in (None, None, EXACT, EXACT):
        average(exchange, GRADIENT.clone(), codec)
    assert memory.iterations == 2


def test_a_density_for_every_iteration_does_not_fill_the_memory() -> None:
    memory = TorchMemory(make_scheme("gtopk", warmup_spec=lambda stage: 1 / (2 + stage)))
    exchange = one_rank(memory)
    for _ in range(2 * KEPT_CODECS):
        average(exchange, GRADIENT.clone(), "sparse(density=0.001)")
    assert len(exchange._codecs) == KEPT_CODECS
