"""Residuals stay bounded with every shipped codec, or there are none."""

import subprocess
import sys

import numpy as np
import pytest

from penstock.codecs.registry import codec_names, make_codec

NOISY = ("qsgd", "qsgd(bits=2)", "terngrad(bitwidth=1)")


@pytest.mark.parametrize("name", [*codec_names(), "qsgd(bits=8)", *NOISY[1:]])
def test_a_codec_never_owes_more_than_it_was_given_in_two_hundred_steps(name: str) -> None:
    codec, rng = make_codec(name, seed=3), np.random.default_rng(5)
    residual, out = np.zeros(2000, np.float32), np.zeros(codec.max_nbytes(2000), np.uint8)
    given = 0.0
    with np.errstate(over="ignore"):
        for _ in range(200 if codec.takes_feedback else 40):
            gradient = 0.02 * rng.standard_normal(2000, np.float32)
            given += float(np.linalg.norm(gradient))
            codec.encode(gradient, residual, out)
        assert (float(np.linalg.norm(residual)) <= given) == codec.takes_feedback


@pytest.mark.parametrize("name", NOISY)
def test_rounding_that_adds_more_than_it_sends_is_found_out(name: str) -> None:
    assert not make_codec(name).takes_feedback


def test_trying_draws_nothing_of_the_codecs_own_random_numbers() -> None:
    one, other = make_codec("terngrad", seed=1), make_codec("terngrad", seed=1)
    assert one.takes_feedback
    gradient = np.random.default_rng(0).standard_normal(100, np.float32)
    payloads = [np.zeros(codec.max_nbytes(100), np.uint8) for codec in (one, other)]
    for codec, out in zip((one, other), payloads, strict=True):
        codec.encode(gradient, None, out)
    assert payloads[0].tobytes() == payloads[1].tobytes()


def test_that_feedback_helps_is_found_without_compiling_anything():
    """A job on a GPU needs no kernel for the CPU: loading numba and compiling two of them took it seconds."""
    program = "import sys; from penstock.codecs.registry import make_codec; codec = make_codec('blocks(bits=4)'); "
    program += "assert codec.takes_feedback and codec.capabilities.deferred_feedback; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
