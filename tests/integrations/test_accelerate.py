"""Accelerate, the real one, on two ranks: stock's weights where dense, bytes as promised, `save_state` resumed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integration_workers import accelerate_runs
from spawn import spawn

pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(2, accelerate_runs, Path(tmp_path_factory.mktemp("accelerate")))


def test_dense_training_ends_with_stocks_weights(ranks):
    for found in ranks:
        stock, ours = found["dense"]
        np.testing.assert_allclose(ours, stock, rtol=1e-4, atol=1e-5)


def test_four_bits_send_an_eighth_of_the_bytes(ranks):
    sent, dense = ranks[0]["sent"]
    assert 1 / 9 < sent / dense < 1 / 4, (sent, dense)


def test_save_state_holds_weights_and_what_each_rank_kept_back(ranks):
    files = ranks[0]["files"]
    assert "model.safetensors" in files
    assert "penstock-exchange/rank-0-of-2.state" in files
    assert "penstock-exchange/rank-1-of-2.state" in files


def test_resuming_from_save_state_ends_as_the_whole_run(ranks):
    for found in ranks:
        np.testing.assert_array_equal(*found["coded"])
        np.testing.assert_array_equal(*found["residuals"])
        assert np.abs(found["residuals"][0]).sum() > 0


def test_mixed_precision_computes_in_bfloat16(ranks):
    assert ranks[0]["computed in"] == {"torch.bfloat16"}


def test_unwrap_model_returns_the_users_model(ranks):
    assert ranks[0]["unwrapped"] == "Gpt"
