"""Hugging Face's Trainer, the real one, on two ranks: losses as stock's where dense, bytes as promised, resumed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integration_workers import BLOCKS, half_trainer_runs, trainer_runs
from spawn import spawn

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(2, trainer_runs, Path(tmp_path_factory.mktemp("trainer")))


def test_dense_training_has_stocks_losses_and_weights(ranks):
    for found in ranks:
        np.testing.assert_allclose(*found["dense"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(*ranks[0]["losses"], rtol=1e-4)
    assert len(ranks[0]["losses"][0]) == 8


@pytest.mark.slow
def test_autocast_is_the_trainers_and_its_losses_are_stocks(tmp_path):
    for found in spawn(2, half_trainer_runs, tmp_path):
        assert found["computed in"] == [{"torch.bfloat16"}] * 2
        assert found["wrapped"]
        np.testing.assert_allclose(*found["losses"], rtol=1e-2)


def test_four_bits_send_an_eighth_of_the_bytes(ranks):
    sent, dense = ranks[0]["sent"]
    assert 1 / 9 < sent / dense < 1 / 4, (sent, dense)


def test_resuming_from_a_checkpoint_ends_as_the_whole_run(ranks):
    assert "penstock-exchange" in ranks[0]["files"]
    for found in ranks:
        np.testing.assert_array_equal(*found["coded"])
        np.testing.assert_array_equal(*found["residuals"])
        assert np.abs(found["residuals"][0]).sum() > 0


def test_what_the_wrapper_knows_is_logged_beside_the_loss(ranks):
    assert {"loss", "penstock/sent_megabytes", "penstock/iteration_seconds"} <= set(ranks[0]["logged"])


def test_a_script_with_hf_argument_parser_takes_the_codec_on_its_command_line(tmp_path):
    from transformers import HfArgumentParser

    from penstock.integrations.transformers import TrainingArguments

    (parsed,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", "true", "--codec", BLOCKS]
    )
    assert parsed.codec == BLOCKS
