"""What of a codec's kernels is hidden behind the model's, on a hand-drawn trace."""

import pytest

pytest.importorskip("torch")
from device_trace import Activity, summarise

MODEL, BESIDE = 7, 20


def test_a_codec_is_hidden_as_long_as_a_kernel_of_the_model_runs():
    trace = [
        Activity("conv", MODEL, 0.0, 4.0),
        Activity("conv", MODEL, 5.0, 1.0),
        Activity("encode_1", BESIDE, 3.0, 2.0),  # a second of it hidden
        Activity("decode", BESIDE, 7.0, 2.0),  # none
        Activity("Memcpy DtoH", BESIDE, 9.0, 0.5),
    ]
    found = summarise(trace, steps=1)
    assert found["codec_seconds"] == 4.0
    assert found["copy_seconds"] == 0.5
    assert found["hidden"] == 0.25
    assert found["kinds"] == {"decode": {"seconds": 2.0, "hidden": 0.0}, "encode": {"seconds": 2.0, "hidden": 0.5}}


def test_a_step_without_a_codec_has_nothing_to_hide():
    assert summarise([Activity("conv", MODEL, 0.0, 4.0)], steps=2)["hidden"] is None
