"""Kernels for many small tensors at once, against numpy: selections, and NaN where something was not finite."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton", reason="install penstock[gpu] to test kernels")

from penstock.compll.backends.triton.fill_nan import NanFill  # noqa: E402
from penstock.compll.backends.triton.select_kernels import SMALL_COUNT, SMALL_NUMEL, Selector  # noqa: E402

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Return the k largest magnitudes' indices, ascending; of equals the first."""
    return np.sort(np.argsort(-np.abs(values), kind="stable")[:k])


def test_small_vectors_are_selected_from_all_at_once() -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(-9, 9, 9000).astype(np.float32)  # many are equal
    vectors = [(10, 1, 1), (11, 5, 5), (100, 700, 3), (4000, SMALL_NUMEL.value, SMALL_COUNT)]
    places = np.cumsum([0, *(k for _, _, k in vectors)])
    table = torch.tensor([(*vector, int(at)) for vector, at in zip(vectors, places, strict=False)], dtype=torch.int32)
    out = torch.full((int(places[-1]),), -1, dtype=torch.int64, device=DEVICE)
    selector = Selector(DEVICE)
    selector.each(torch.from_numpy(values).to(DEVICE), table.t().contiguous().to(DEVICE), out)
    wanted = [start + largest(values[start : start + numel], k) for start, numel, k in vectors]
    assert out.tolist() == np.concatenate(wanted).tolist()
    assert all(selector.is_small(numel, k) for _, numel, k in vectors)
    assert not selector.is_small(SMALL_NUMEL.value + 1, 1)


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_pieces_with_a_value_that_is_not_finite_become_nan_and_others_stay(wrong: float) -> None:
    pieces, flags = [(0, 3), (5, 3000), (3000, 3001)], torch.zeros(3, dtype=torch.int32, device=DEVICE)
    chosen = torch.tensor([1.0, 2.0, wrong, 4.0], device=DEVICE)
    bucket = torch.ones(3001, device=DEVICE)
    nan_fill = NanFill(pieces, flags)
    nan_fill.look(chosen, torch.tensor([0, 1, 3, 4], device=DEVICE))
    nan_fill.fill(bucket)
    assert flags.tolist() == [0, 1, 0]
    assert torch.equal(bucket.isnan().cpu(), torch.arange(3001).ge(5) & torch.arange(3001).lt(3000))
