"""Lightning, the real one, on two ranks: stock's weights where dense, bytes as promised, checkpoints resumed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integration_workers import lightning_runs
from penstock.errors import PlanError
from spawn import spawn

pytest.importorskip("lightning")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(2, lightning_runs, Path(tmp_path_factory.mktemp("lightning")))


def test_dense_training_ends_with_stocks_weights(ranks):
    for found in ranks:
        np.testing.assert_allclose(*found["dense"], rtol=1e-4, atol=1e-5)


def test_four_bits_send_an_eighth_of_the_bytes(ranks):
    sent, dense = ranks[0]["sent"]
    assert 1 / 9 < sent / dense < 1 / 4, (sent, dense)


def test_resuming_from_a_checkpoint_ends_as_the_whole_run(ranks):
    assert "step=4.ckpt.exchange/rank-1-of-2.pt" in ranks[0]["files"]
    for found in ranks:
        np.testing.assert_array_equal(*found["coded"])
        np.testing.assert_array_equal(*found["residuals"])
        assert np.abs(found["residuals"][0]).sum() > 0


def test_removing_a_checkpoint_removes_what_is_beside_it(ranks):
    assert ranks[0]["left"] == ["step=8.ckpt", "step=8.ckpt.exchange"]


def test_the_registered_name_is_our_strategy_and_keeps_lightnings_precision(ranks):
    assert ranks[0]["named"]
    assert ranks[0]["computed in"] == {"torch.bfloat16"}


def test_the_trainers_logger_gets_what_the_wrapper_knows(ranks):
    assert "penstock/sent_megabytes" in ranks[0]["logged"]


def test_another_strategy_beside_a_codec_is_refused():
    from penstock.integrations.lightning import Trainer

    with pytest.raises(PlanError, match="strategy is 'fsdp' and codec is given"):
        Trainer(strategy="fsdp", codec="onebit")
