"""What loggers get: TensorBoard's own reader finds our numbers, and a run of Weights & Biases too."""

from pathlib import Path
from typing import Any

import pytest

from integration_workers import logged_run
from spawn import spawn


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = Path(tmp_path_factory.mktemp("logged"))
    return folder, spawn(2, logged_run, folder)[0]


def test_metrics_say_what_was_sent_and_how_long_it_took(run):
    found = run[1]["metrics"]
    assert 0 < found["penstock/sent_megabytes"] < found["penstock/dense_megabytes"] / 4
    assert found["penstock/iteration_seconds"] >= found["penstock/waiting_seconds"] >= 0


def test_a_model_without_our_wrapper_has_no_metrics(run):
    assert run[1]["stock"] == {}


def test_tensorboard_reads_numbers_of_every_second_step_and_the_explanation(run):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(run[0] / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("penstock/sent_megabytes")] == [0, 2, 4, 6]
    assert "penstock/explain/text_summary" in events.Tags()["tensors"]


@pytest.mark.slow  # starts a service
def test_weights_and_biases_gets_numbers_with_their_step(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from penstock.integrations.metrics import WandbCallback

    with wandb.init(mode="offline", dir=str(tmp_path)) as run:
        WandbCallback(run).write({"penstock/sent_megabytes": 1.5}, 20)
        WandbCallback(run).explain("ring+onebit", 20)
        assert run.summary["penstock/explain"] == "ring+onebit"
        assert run.step == 20
