"""Selections from many small tensors at once, against numpy."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton", reason="install penstock[gpu] to test kernels")

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
