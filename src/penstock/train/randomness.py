"""The state of every random generator a training step may use, as values that `torch.load` takes without pickle."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's generators."""
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(key, np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go back to `state`."""
    random.setstate(state["python"])
    kind, key, *rest = state["numpy"]
    np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_everything(seed: int) -> None:
    """Seed every generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave all generators after the block as they were before it."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
