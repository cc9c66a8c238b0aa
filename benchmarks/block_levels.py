"""Which levels and which scale should a block of few-bit integers have? Prints the table of docs/codecs/blocks.md.

For each choice: |residual|^2 / |gradient|^2 after 40 steps of feedback on independent gradients, in blocks of 256.
Plain numpy, no codec of ours, always the same numbers.
"""

import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.float64]  # a row for each block
Scale = Callable[[Blocks], Blocks]
BLOCKS, STEPS = 400, 40


def largest(x: Blocks) -> Blocks:
    """The largest magnitude."""
    return np.abs(x).max(axis=1, keepdims=True) + 1e-30


def signed(x: Blocks) -> Blocks:
    """The value of largest magnitude."""
    top, bottom = x.max(axis=1, keepdims=True), x.min(axis=1, keepdims=True)
    return np.where(top >= -bottom, top, bottom) + 1e-30


def rms(x: Blocks) -> Blocks:
    """The root of the mean square."""
    return np.sqrt((x * x).mean(axis=1, keepdims=True)) + 1e-30


def mean(x: Blocks) -> Blocks:
    """The mean magnitude."""
    return np.abs(x).mean(axis=1, keepdims=True) + 1e-30


def uniform(low: float, high: float, scale: Scale, share: float) -> Callable[[Blocks], Blocks]:
    """Return rounding to multiples of scale * share from `low` to `high`, whole or, from 1.5, half ones."""

    def quantise(x: Blocks) -> Blocks:
        step = scale(x) * share
        shift = low % 1
        return (np.clip(np.floor(x / step - shift + 0.5) + shift, low, high)) * step

    return quantise


def two_means(x: Blocks) -> Blocks:
    """The mean of the values of the same sign, as onebit has it."""
    up = x >= 0
    means = [
        (x * side).sum(axis=1, keepdims=True) / np.maximum(side.sum(axis=1, keepdims=True), 1) for side in (up, ~up)
    ]
    return np.where(up, *means)


CHOICES: dict[str, Callable[[Blocks], Blocks]] = {
    "4 bits, -7 to 7, max / 7": uniform(-7, 7, largest, 1 / 7),
    "4 bits, -7 to 8, signed max / 8": uniform(-7, 8, signed, 1 / 8),
    "4 bits, -7 to 7, rms * 0.36": uniform(-7, 7, rms, 0.36),
    "2 bits, -1.5 to 1.5, rms": uniform(-1.5, 1.5, rms, 1),
    "2 bits, -1.5 to 1.5, mean * 1.25": uniform(-1.5, 1.5, mean, 1.25),
    "2 bits, -1 to 1, max / 2": uniform(-1, 1, largest, 1 / 2),
    "2 bits, -1 to 2, signed max / 2": uniform(-1, 2, signed, 1 / 2),
    "2 bits, -1 to 2, signed max / 3": uniform(-1, 2, signed, 1 / 3),
    "1 bit, two means": two_means,
}


def gradients(block: int) -> dict[str, Callable[[], Blocks]]:
    """Return what gradients are drawn from."""
    rng = np.random.default_rng(1)
    shape = BLOCKS, block
    deviations, chosen = np.exp(rng.standard_normal(shape)), rng.random(shape) < 0.05
    return {
        "Gauss": lambda: rng.standard_normal(shape),
        "Laplace": lambda: rng.laplace(size=shape),
        "t, 3": lambda: rng.standard_t(3, size=shape),
        "uneven": lambda: deviations * rng.standard_normal(shape),
        "sparse": lambda: chosen * rng.standard_normal(shape),
    }


def left_over(quantise: Callable[[Blocks], Blocks], steps: list[Blocks]) -> float:
    """Return what feedback leaves after the last step, squared, relative to a gradient's square."""
    residual = np.zeros_like(steps[0])
    for gradient in steps:
        total = gradient + residual
        residual = total - quantise(total)
    return float((residual**2).sum() / np.mean([(gradient**2).sum() for gradient in steps]))


if __name__ == "__main__":
    block = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    drawn = {name: [draw() for _ in range(STEPS)] for name, draw in gradients(block).items()}
    print(f"| levels, scale | {' | '.join(drawn)} |\n| --- |{' --- |' * len(drawn)}")
    for name, quantise in CHOICES.items():
        print(f"| {name} | {' | '.join(f'{left_over(quantise, steps):.3f}' for steps in drawn.values())} |")
